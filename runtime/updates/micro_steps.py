"""Micro-batches: backwards that no step follows. The code that runs the loop knows.

`megacompile.accumulate(model)` says so for one model. Loops that count micro-batches by themselves
say it in places of their own, which are the sources here. A source that is wrong about "another one
comes" costs time and host memory alone: `optimizer.step()` then makes the update of the gradients
on the host. Where replicas share the model, the sum over them was left to that other one, and
`optimizer.step()` refuses. So a source may guess to that side, and never to the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class MicroSteps:
    """Finds the backwards of one model that are of micro-batches, but for the last."""

    def __init__(self) -> None:
        self.marked = False  # inside of megacompile.accumulate()

    @property
    def more(self) -> bool:
        """True if another backward comes before the step."""
        return self.marked or more_to_come()


def more_to_come() -> bool:
    """True if a loop says that another backward comes before its next step."""
    return any(source() for source in SOURCES)


def _accelerate() -> bool:
    """Accelerate's `GradientState`, one for the process.

    `Accelerator.accumulate()` sets it, and so do the loops of Trainer and of what derives from it.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state().sync_gradients


SOURCES: tuple[Callable[[], bool], ...] = (_accelerate,)
