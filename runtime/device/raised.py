"""Errors of a rank that cannot go on, as the others raise them."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

from megacompile import errors
from megacompile.errors import MegacompileError, RankError
from megacompile.runtime.device.rank_notes import described

_KNOWN = "_megacompile_known_to_ranks"


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of one rank, which it tells the others."""

    kind: str  # its class
    message: str
    ours: bool  # is it one of megacompile's?

    @staticmethod
    def of(error: Exception) -> Raised:
        """The text of an error for the other ranks."""
        ours = isinstance(error, MegacompileError) and hasattr(errors, type(error).__name__)
        return Raised(type(error).__name__, str(error) if ours else described(error), ours)

    def text(self) -> str:
        """For the store."""
        return json.dumps(astuple(self))

    @staticmethod
    def read(text: str) -> Raised:
        """Reads what `text` has written."""
        return Raised(*json.loads(text))

    def error(self, rank: int, what: str) -> MegacompileError:
        """The error that the other ranks raise.

        Args:
            rank: that has raised it.
            what: they did together.
        """
        if not self.ours:
            why = f"raised {self.message}, in {what}"
            return RankError(
                f"rank {rank} {why}; all ranks stop there; fix the error of that rank",
                by=rank,
                why=why,
            )
        raised: MegacompileError = getattr(errors, self.kind)(f"rank {rank}: {self.message}")
        make_known(raised)
        return raised


def is_known(error: Exception) -> bool:
    """True if all ranks know of it, so that it need not be said once more."""
    return isinstance(error, RankError) or getattr(error, _KNOWN, False)


def make_known(error: Exception) -> None:
    """All ranks have raised it, or will."""
    setattr(error, _KNOWN, True)
