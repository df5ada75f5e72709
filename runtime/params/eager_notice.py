"""Where a user's code runs in eager mode: said once, because it is slow."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from megacompile import compat


class EagerNotice:
    """Says once, with the place, that code of the user's runs in eager mode."""

    def __init__(self) -> None:
        self.said = False
        self.used = False  # by eager code, or an unknown caller

    def __call__(self) -> None:
        self.used = True
        if self.said or compat.backward_id() != -1:  # a backward is where its forward was
            return
        place = _place_in_user_code()
        if place is not None:
            self.said = True
            warnings.warn(
                f"megacompile: {place} runs in eager mode and fetches each parameter at each use "
                "(slower, same numbers; said once): Dynamo did not capture it, and "
                "TORCH_LOGS=graph_breaks says why",
                stacklevel=2,
            )


def _place_in_user_code() -> str | None:
    """The innermost line that is not ours or torch's; None in a captured graph or in Dynamo."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if compat.is_of_capture(frame):
            return None
        if module.partition(".")[0] not in ("torch", "megacompile"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return None
