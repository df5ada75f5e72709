"""The checkpoint that a model gets its values from, and the way its names are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, init=False)
class Checkpoint:
    """A checkpoint in safetensors, for `megacompile(model, checkpoint=...)`.

    Args:
        path: a folder, as `save_pretrained` or `megacompile.save` writes it, or a file.
        names: the checkpoint's name of a tensor, from the model's. Default: the same; or, if that
            fits better, without the path of the module that has all parameters (a model in a
            wrapper that returns its loss alone).
        cast: convert dtypes, also where digits are lost. Default: only where none are.
        ignore: patterns (`fnmatch`) of the checkpoint's names that the model may lack.
        initialize: patterns of the model's names that the checkpoint may lack; these get values at
            random, as without a checkpoint.
    """

    path: Path
    names: Callable[[str], str] | None
    cast: bool
    ignore: tuple[str, ...]
    initialize: tuple[str, ...]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        names: Callable[[str], str] | None = None,
        cast: bool = False,
        ignore: str | Iterable[str] = (),
        initialize: str | Iterable[str] = (),
    ) -> None:
        for field, value in (
            ("path", Path(path)),
            ("names", names),
            ("cast", cast),
            ("ignore", (ignore,) if isinstance(ignore, str) else tuple(ignore)),
            ("initialize", (initialize,) if isinstance(initialize, str) else tuple(initialize)),
        ):
            object.__setattr__(self, field, value)

    @staticmethod
    def of(given: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
        """The user's `checkpoint=`."""
        return given if isinstance(given, Checkpoint) else Checkpoint(given)
