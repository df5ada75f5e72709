"""Device memory that plans may use, what they took of it, and less of it when that was too much.
The same of the disk: what they may use."""

from __future__ import annotations

from megacompile.ir.plan import Choice
from megacompile.plan.fit import device_table
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes

_LESS = 0.9  # of what the largest plan needed, when that was too much
_REMEMBERED = 8  # captured graphs: the one that can do with the least says how far down to go


class Budget:
    """Device memory that plans may use.

    Args:
        setting: where the user says nothing, what is free when it is first asked for.
        limit_bytes: of the device, what plans may use. None: what `setting` says.
        disk_bytes: the same of the disk. None: asked for when it is needed.
    """

    def __init__(
        self, setting: Setting, limit_bytes: int | None = None, disk_bytes: int | None = None
    ) -> None:
        self._disk_bytes = disk_bytes
        self.setting = setting
        self.limit_bytes = setting.options.gpu_memory if limit_bytes is None else limit_bytes
        self._is_of_all = False  # have ranks said how much each of them may use?
        self._needed_bytes = 0  # by the largest plan since it was last made smaller, as predicted
        self._problems: list[Problem] = []  # of the captured graphs, the last one last

    def size_bytes(self) -> int:
        """The user's limit, or what was free at first."""
        if self.limit_bytes is None:
            self.limit_bytes = self.setting.free_bytes()
        return self.limit_bytes

    def disk_bytes(self) -> int | None:
        """Memory on the disk for the whole model, as it was when it was first asked for; None:
        there is no disk."""
        if self._disk_bytes is None:
            self._disk_bytes = self.setting.disk_budget_bytes()
        return self._disk_bytes

    def agree(self) -> None:
        """Takes the least that any of the ranks may use, which they say once, all at the same
        place: so their plans let the same buckets live on their devices."""
        if self.setting.least is not None and not self._is_of_all:
            self._is_of_all = True
            self.limit_bytes = self.setting.least(self.size_bytes())

    def note(self, problem: Problem, peak_bytes: int) -> None:
        """A plan was chosen for a problem, with this peak of device memory."""
        self._needed_bytes = max(self._needed_bytes, peak_bytes)
        self._problems = [*self._problems[-(_REMEMBERED - 1) :], problem]

    def holds(self, more_bytes: int, peak_bytes: int) -> bool:
        """True if there is room for code that takes so much more than was planned, with this
        peak."""
        return max(self._needed_bytes + more_bytes, peak_bytes) <= self.size_bytes()

    def step_down(self) -> str:
        """Nine tenths of what the largest plan needs; says so, or "" where that changes nothing."""
        if not self._needed_bytes or not self.setting.options.plans:
            return ""
        floor_bytes = min(problem.floor_bytes() for problem in self._problems)
        if self._needed_bytes <= floor_bytes:
            return ""
        self.limit_bytes = max(int(_LESS * self._needed_bytes), floor_bytes)
        self._needed_bytes = 0
        return f"at most {format_bytes(self.limit_bytes)} of device memory"

    def needs(self) -> str:
        """Device memory of the smallest feasible plan, as a table; "" if not known."""
        if not self._problems:
            return ""
        problem = self._problems[-1]
        return device_table(problem, Choice(0, problem.here), problem.floor().peak)
