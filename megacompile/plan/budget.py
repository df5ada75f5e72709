"""The memory budgets of plans: the device's, which shrinks after an out-of-memory error, and the
disk's."""

from __future__ import annotations

from megacompile.ir.plan import Choice
from megacompile.plan.fit import device_table
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes

_LESS = 0.9  # of the largest plan's memory, after that was too much
_REMEMBERED = 8  # captured graphs; the smallest floor among them limits `step_down`


class Budget:
    """The device memory and disk space that plans may use.

    Args:
        setting: its free memory is the default limit, read at the first use.
        limit_bytes: of device memory. None: that of `setting`.
        disk_bytes: limit of the disk. None: that of `setting`, read at the first use.
    """

    def __init__(
        self, setting: Setting, limit_bytes: int | None = None, disk_bytes: int | None = None
    ) -> None:
        self._disk_bytes = disk_bytes
        self.setting = setting
        self.limit_bytes = setting.options.gpu_memory if limit_bytes is None else limit_bytes
        self._is_of_all = False  # have ranks agreed on a limit?
        self._needed_bytes = 0  # predicted, by the largest plan since the last `step_down`
        self._problems: list[Problem] = []  # of the captured graphs, the latest last

    def size_bytes(self) -> int:
        """The user's limit, or the memory that was free at the first use."""
        if self.limit_bytes is None:
            self.limit_bytes = self.setting.free_bytes()
        return self.limit_bytes

    def disk_bytes(self) -> int | None:
        """Disk space for the whole model, as of the first use; None: no disk."""
        if self._disk_bytes is None:
            self._disk_bytes = self.setting.disk_budget_bytes()
        return self._disk_bytes

    def agree(self) -> None:
        """Lower the limit to the smallest of all ranks, so that their plans keep the same buckets
        resident. This is a collective; it runs once."""
        if self.setting.least is not None and not self._is_of_all:
            self._is_of_all = True
            self.limit_bytes = self.setting.least(self.size_bytes())

    def note(self, problem: Problem, peak_bytes: int) -> None:
        """Record the peak device memory of a chosen plan."""
        self._needed_bytes = max(self._needed_bytes, peak_bytes)
        self._problems = [*self._problems[-(_REMEMBERED - 1) :], problem]

    def holds(self, more_bytes: int, peak_bytes: int) -> bool:
        """True if code fits that needs `more_bytes` beyond the plans, or `peak_bytes` in total."""
        return max(self._needed_bytes + more_bytes, peak_bytes) <= self.size_bytes()

    def step_down(self) -> str:
        """Lower the limit to nine tenths of the largest plan's memory; describes the new limit, or
        returns "" if nothing changes."""
        if not self._needed_bytes or not self.setting.options.plans:
            return ""
        floor_bytes = min(problem.floor_bytes() for problem in self._problems)
        if self._needed_bytes <= floor_bytes:
            return ""
        self.limit_bytes = max(int(_LESS * self._needed_bytes), floor_bytes)
        self._needed_bytes = 0
        return f"at most {format_bytes(self.limit_bytes)} of device memory"

    def needs(self) -> str:
        """Device memory of the smallest feasible plan, as a table; "" if unknown."""
        if not self._problems:
            return ""
        problem = self._problems[-1]
        return device_table(problem, Choice(0, problem.here), problem.floor().peak)
