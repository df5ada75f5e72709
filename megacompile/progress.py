"""Progress bars on stderr, for what takes seconds on a large model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def bar(
    what: str, total: int, show: bool | None, *, unit: str = "it"
) -> Iterator[Callable[[int], object]]:
    """A bar of `total` units; yields a function that advances it. `show=None`: on a terminal."""
    disable = None if show is None else not show
    with tqdm(
        total=total,
        desc=f"megacompile: {what}",
        unit=unit,
        unit_scale=unit == "B",
        disable=disable,
        leave=False,
    ) as progress:
        yield progress.update
