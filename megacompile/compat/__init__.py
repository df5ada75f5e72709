"""Every private torch API, nowhere else, by what it touches.

Each entry says on which versions of torch it was seen: `make matrix` runs the tests of all of them
on each (docs/decisions/0018-torch-as-a-moving-target.md). Callers use `compat.name`.
"""

from megacompile.compat.autograd import *
from megacompile.compat.breaks import *
from megacompile.compat.caches import *
from megacompile.compat.captures import *
from megacompile.compat.classes import *
from megacompile.compat.containers import *
from megacompile.compat.described import *
from megacompile.compat.devices import *
from megacompile.compat.dynamo import *
from megacompile.compat.experts import *
from megacompile.compat.graphs import *
from megacompile.compat.inductor import *
from megacompile.compat.modules import *
from megacompile.compat.operators import *
from megacompile.compat.optimizers import *
from megacompile.compat.processes import *
from megacompile.compat.real_strides import *
from megacompile.compat.regions import *
from megacompile.compat.sharded import *
from megacompile.compat.stores import *
from megacompile.compat.symbols import *
from megacompile.compat.tensors import *
from megacompile.compat.tracing import *
