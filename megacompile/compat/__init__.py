"""Every private torch API, nowhere else, by what it touches.

All entries were seen on torch 2.11 to 2.15: `make matrix` runs their tests on each version
(docs/decisions/0018-torch-as-a-moving-target.md). Callers use `compat.name`.
"""

from megacompile.compat.autograd import *
from megacompile.compat.distributed import *
from megacompile.compat.dynamo import *
from megacompile.compat.graphs import *
from megacompile.compat.inductor import *
from megacompile.compat.kernels import *
from megacompile.compat.modules import *
from megacompile.compat.operators import *
from megacompile.compat.patches import *
from megacompile.compat.symbols import *
from megacompile.compat.tensors import *
from megacompile.compat.tracing import *
from megacompile.compat.variables import *
