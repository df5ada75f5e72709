"""Warnings that point at the user's line.

What warns may be called by hooks, decorators and generated code: the number of frames up to the
user's code is not known where the text is. So the frames are looked at.
"""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

# Nobody wants a line of these: ours, and what calls us on behalf of the user's code.
_PASSED = frozenset(("megacompile", "torch", "contextlib", "functools", "threading", "concurrent"))


def warn(text: str) -> None:
    """Warn at the innermost line that is neither ours nor torch's; in a thread of ours, here."""
    here = inspect.currentframe()
    assert here is not None
    frame: FrameType = here
    while _is_passed(frame):
        if frame.f_back is None:
            frame = here
            break
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno or 0,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_passed(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<megacompile"):  # the Python of a schedule or a stage
        return True
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PASSED
