"""Views of a schedule (Python, table, differences, graph) and of the times of its ops.

Measured times come from a recorder, predicted ones from the cost model. Both are timelines, which
can be summed, reduced to their critical path, saved for Perfetto and plotted.
"""

from megacompile.ir.schedule import VIEWS
from megacompile.views.graph import to_dot, to_networkx
from megacompile.views.python import code
from megacompile.views.schedule_table import diff, passes, table

VIEWS.update(
    code=code, table=table, diff=diff, passes=passes, to_networkx=to_networkx, to_dot=to_dot
)
