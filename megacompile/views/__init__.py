"""Views of a schedule (Python, table, difference, graph) and of the times of its ops.

Measured times come from a recorder, predicted ones from the cost model. Both are timelines, which
can be summed, reduced to their critical path, and saved for Perfetto.
"""

from megacompile.ir.schedule import VIEWS
from megacompile.views.graph import to_networkx
from megacompile.views.python import code, diff, table

VIEWS.update(code=code, table=table, diff=diff, to_networkx=to_networkx)
