"""Arguments of FX nodes, set in a fraction of an assignment's time.

`node.args = args` also takes the node out of the graph's table of targets and puts it back, which
is for a node that gets another target. A search makes a million nodes.
"""

from __future__ import annotations

from typing import Any

from torch import fx

_ARGS: Any = fx.Node.args
_KWARGS: Any = fx.Node.kwargs


def set_args(node: fx.Node, args: Any) -> None:
    """As `node.args = args`."""
    _ARGS.fset(node, args)


def set_kwargs(node: fx.Node, kwargs: Any) -> None:
    """As `node.kwargs = kwargs`."""
    _KWARGS.fset(node, kwargs)
