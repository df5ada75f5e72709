"""Finds the rank to blame when a rank waits for others: by what their notes say, and no longer say.

    raised, disagreed      it says so at once
    ended                  it says so at its end, where Python ends in order
    killed                 its process is not there, on the same machine; silent for 30 s elsewhere
    stopped                silent for 30 s
    idle                   behind, and its process used no processor for 45 s
    busy                   behind until the timeout of the process group is over

A rank that saves a checkpoint or compiles is busy: no rank is to be ended for that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megacompile import compat
from megacompile.errors import RankError
from megacompile.runtime.device.rank_notes import Note, Notes

SILENT_S = 30.0  # no note for so long: the process, or its machine, is gone or stopped
PATIENCE_S = 45.0  # for a rank that is behind and does nothing
_ONE_LOOK_S = 5.0  # longer between two: what was seen before says nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a rank that waits for another one."""

    patience_s: float  # that is behind and does nothing
    limit_s: float  # that is behind, whatever it does

    @staticmethod
    def of(group: Any, device: torch.device) -> Limits:
        """Those of a process group: its own, where a timeout was set."""
        timeout_s, default = compat.group_timeout_s(group, device)
        return Limits(min(PATIENCE_S, timeout_s) if default else timeout_s, timeout_s)


class Faults:
    """The faults of the other ranks; for one thread."""

    def __init__(self, notes: Notes, limits: Limits, *, thread: bool) -> None:
        self._notes, self._limits, self._thread = notes, limits, thread
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last note, and since when
        self._looked_s = 0.0

    def look(self, where: str, waited_s: float, *, failed: bool) -> None:
        """Raise if a rank will not come.

        Args:
            where: the op in which this rank waits.
            waited_s: for how long.
            failed: has the op failed?

        Raises:
            RankError: with the rank, and why.
            dist.DistError: the store is gone.
        """
        others = self._notes.others(thread=self._thread)
        here = self._notes.position[:2]
        now_s = time.monotonic()
        if now_s - self._looked_s > _ONE_LOOK_S:
            self._beats.clear()
        self._looked_s = now_s
        self._look_for_reports(others, where)
        for rank, note in others.items():
            behind = (note.n, note.entered) < here
            why = self._why(rank, note, waited_s, behind=behind, failed=failed)
            if why:
                self._blame(rank, why, where)
        if waited_s > self._limits.limit_s:
            for rank in self._notes.ranks:
                if rank != self._notes.rank and rank not in others:
                    why = f"has not called megacompile() with these ranks in {waited_s:.0f} s"
                    self._blame(rank, why, where)
            rank = min(others, key=lambda r: (others[r].n, others[r].entered))
            self._blame(rank, _late(others[rank], waited_s), where)

    def look_for_reports(self, where: str) -> None:
        """Raise if a rank says that it has stopped."""
        self._look_for_reports(self._notes.others(thread=self._thread), where)

    def _look_for_reports(self, others: Mapping[int, Note], where: str) -> None:
        for note in others.values():
            if note.fault and note.by < 0:  # ranks disagree: it says it all
                raise RankError(note.fault, why=note.fault)
            if note.fault:
                self._blame(note.by, note.fault, where)

    def _why(self, rank: int, note: Note, waited_s: float, *, behind: bool, failed: bool) -> str:
        """The fault of a rank; "" if there is none."""
        if note.ended:
            return f"has ended ({note.ended}), {note.at}" if behind or failed else ""
        if not self._notes.runs(note):
            return f"was killed (process {note.pid}), last seen {note.at}"
        if self._silent_s(rank, note) > SILENT_S:
            return (
                f"has given no sign of life for {SILENT_S:.0f} s (process {note.pid} is stopped, "
                f"or its machine is gone), last seen {note.at}"
            )
        if behind and min(waited_s, note.idle_s) > self._limits.patience_s:
            return _late(note, waited_s)
        return ""

    def _silent_s(self, rank: int, note: Note) -> float:
        beat, since_s = self._beats.get(rank, (-1, 0.0))
        if beat != note.beat:
            since_s = self._looked_s
        self._beats[rank] = (note.beat, since_s)
        return self._looked_s - since_s

    def _blame(self, rank: int, why: str, where: str) -> None:
        raise RankError(
            f"rank {self._notes.rank} waits in {where} for rank {rank}, which {why}; all "
            "ranks stop; fix the error of that rank, or give it more time: "
            "init_process_group(timeout=...)",
            by=rank,
            why=why,
        )


def _late(note: Note, waited_s: float) -> str:
    idle = note.idle_s > waited_s / 2
    does = f"has done nothing for {note.idle_s:.0f} s" if idle else "works"
    return f"has not come there in {waited_s:.0f} s: it is {note.at}, and {does}"
