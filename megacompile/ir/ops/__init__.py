"""The vocabulary of a schedule: the functions that its FX nodes call.

The nodes show all of a schedule's synchronization: the values that a node takes (read after write),
the order of its stream, and `after=` (write after read, free after use, and tokens of earlier
graphs: `megacompile.ir.edges`). The runtime turns each such edge that crosses streams into an event
record and a wait; the same edges are what `megacompile.verify` proves.
"""

from megacompile.ir.ops.bucket_ops import *
from megacompile.ir.ops.op import *
from megacompile.ir.ops.stage_ops import *
