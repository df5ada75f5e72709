"""A schedule as people look at it: the Python that runs, a table, a diff, a graph."""

from megacompile.ir.schedule import VIEWS
from megacompile.show.diff import diff, passes
from megacompile.show.graph import to_dot, to_networkx
from megacompile.show.python import code
from megacompile.show.table import table

VIEWS.update(
    code=code, table=table, diff=diff, passes=passes, to_networkx=to_networkx, to_dot=to_dot
)
