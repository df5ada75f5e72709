"""What programs of frames (`tests.frames`) import: operators, and code that Dynamo leaves alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("megacompile_frames::note", mutates_args=("seen",))
def note(seen: Tensor, value: Tensor) -> None:
    """Write to `seen` in place."""
    seen.add_(value)


@torch._dynamo.disable  # type: ignore[untyped-decorator,unused-ignore]
def untraced(*_: Any) -> None:
    """Nothing, in eager mode."""


@torch._dynamo.disable  # type: ignore[untyped-decorator,unused-ignore]
def eagerly(function: Any, *args: Any) -> Any:
    """Call a function that Dynamo does not see."""
    return function(*args)
