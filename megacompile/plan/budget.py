"""Device memory that plans may use, what they took of it, and less of it when that was too much."""

from __future__ import annotations

from megacompile.plan.planner import Problem, table
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes

_LESS = 0.9  # of what the largest plan needed, when that was too much


class Budget:
    """How much device memory plans may use.

    Args:
        setting: where the user says nothing, what is free when it is first asked for.
        limit_bytes: what plans may use. None: what `setting` says.
    """

    def __init__(self, setting: Setting, limit_bytes: int | None = None) -> None:
        self.setting = setting
        self.limit_bytes = setting.options.gpu_memory if limit_bytes is None else limit_bytes
        self._needed_bytes = 0  # by the largest plan since it was last made smaller, as predicted
        self._floor_bytes: int | None = None  # of the captured graph that can do with the least
        self._problem: Problem | None = None  # the last one

    def size_bytes(self) -> int:
        """What the user said, or what was free at first."""
        if self.limit_bytes is None:
            self.limit_bytes = self.setting.free_bytes()
        return self.limit_bytes

    def note(self, problem: Problem, peak_bytes: int) -> None:
        """A plan was chosen for a problem, with this peak of device memory."""
        floor_bytes = problem.floor_bytes()
        if self._floor_bytes is not None:
            floor_bytes = min(floor_bytes, self._floor_bytes)
        self._needed_bytes = max(self._needed_bytes, peak_bytes)
        self._floor_bytes = floor_bytes
        self._problem = problem

    def step_down(self) -> str:
        """Nine tenths of what the largest plan needs; says so, or "" where that changes nothing."""
        floor_bytes = self._floor_bytes or 0
        if not self._needed_bytes or not self.setting.options.plans:
            return ""
        if self._needed_bytes <= floor_bytes:
            return ""
        self.limit_bytes = max(int(_LESS * self._needed_bytes), floor_bytes)
        self._needed_bytes = 0
        return f"at most {format_bytes(self.limit_bytes)} of device memory"

    def needs(self) -> str:
        """What of device memory the least demanding plan needs, as a table; "" if not known."""
        if self._problem is None:
            return ""
        return table(self._problem, self._problem.floor().peak)
