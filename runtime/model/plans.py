"""The planner of a model's schedules, and the placement of the buckets for which they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megacompile.errors import DeviceMemoryError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Capture, Variant
from megacompile.ir.plan import Placement
from megacompile.ir.schedule import Schedule
from megacompile.ir.symbols import Values


class Compiler(Protocol):
    """Makes schedules; `megacompile.plan.compiler` binds it to the passes."""

    def partition(self, capture: Capture) -> Schedule:
        """Stages only."""

    def resized(self, stages: Schedule, values: Values) -> Schedule:
        """The stages, planned for other values of their symbols."""

    def choose(
        self,
        stages: Schedule,
        capture: Capture,
        variant: Variant,
        placement: Placement,
        *,
        again: bool = False,
    ) -> Placement:
        """Choose what `plan` builds; returns where the plans made so far want the buckets, which
        may leave the device with `again`."""

    def plan(
        self, stages: Schedule, capture: Capture, variant: Variant, placement: Placement
    ) -> Schedule:
        """The verified schedule without code, with the buckets where they are."""

    def lower(self, schedule: Schedule) -> Schedule:
        """Lowers what `plan` returned."""

    def code_is_ready(self) -> bool:
        """True if code is compiled by now that schedules ran without."""

    def load_code(self, patience_s: float) -> bool:
        """Loads it, for so long. True if all of it is loaded."""

    def use_code(self) -> None:
        """Runs the loaded code from now on. No backward may be to come."""

    def wants(self, placement: Placement) -> Placement:
        """The placement that the plans made so far want for the buckets, which are as `placement`
        says."""

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Code that is not captured reads buckets: they may live on the device."""

    def replan(self) -> None:
        """Choose again, with the buckets where they are. No backward may be to come."""

    def find_gradients(self) -> bool:
        """From now on a forward may find gradients of buckets that live on the device. True if all
        is chosen again, because plans made so far leave no memory for them."""

    def step_down(self) -> str:
        """Make plans that need less from now on; says how, or "" where nothing is left to give."""

    def needs(self) -> str:
        """Device memory of the smallest plan, as a table; "" if not known."""

    def retain(self, stages: Collection[Schedule], schedules: Collection[Schedule]) -> None:
        """Forget what was made for all but these results of `partition` and `build`."""

    def rest(self, buckets: Sequence[Bucket], placement: Placement) -> Schedule:
        """A schedule that is an update alone: of these buckets, where they are."""


class MovesFirst(BaseException):
    """Buckets move before a captured graph runs for the first time, and the call begins again.

    User code between the two that catches `Exception` must not see it.

    Args:
        lacking: what the call ends with if they cannot move. None: nothing of the call has run, and
            they can.
    """

    def __init__(self, lacking: DeviceMemoryError | None = None) -> None:
        super().__init__()
        self.lacking = lacking


class Plans:
    """The plans of a model for one layout of its buckets.

    Args:
        compiler: of the units whose buckets they are.
        placement: where the buckets are.
    """

    def __init__(self, compiler: Compiler, placement: Placement) -> None:
        self.compiler = compiler
        self.placement = placement
        self.version = 0  # of what was planned: older schedules are planned again when they are met

    def expire(self) -> None:
        """Every captured graph plans again at its next call."""
        self.version += 1

    def choose(
        self, stages: Schedule, capture: Capture, variant: Variant, *, again: bool = False
    ) -> Placement:
        """Choose the plan that `plan` builds; returns where the buckets should be.

        Args:
            again: buckets may leave the device, where a plan for smaller inputs has put them.
        """
        return self.compiler.choose(stages, capture, variant, self.placement, again=again)

    def plan(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """A schedule without code, for the buckets where they are."""
        return self.compiler.plan(stages, capture, variant, self.placement)

    def rest(self, buckets: Sequence[Bucket]) -> Schedule:
        """A schedule whose update is that of these buckets, where they are."""
        return self.compiler.rest(buckets, self.placement)

    @property
    def wanted(self) -> Placement:
        """The placement of the buckets and their states from the next call on."""
        return self.compiler.wants(self.placement)

    def note_fetches(self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]]) -> None:
        """Code that is not captured reads buckets: they may live on the device.

        Args:
            trained: the parameters that get a gradient: bucket key -> indices.
        """
        self.compiler.note_fetches(buckets, trained, self.placement)

    def moved(self, placement: Placement) -> None:
        """The buckets are there now: every captured graph plans again."""
        self.placement = placement
        self.expire()

    def say_stays(self, why: str) -> None:
        """From now on plans say why buckets stay where they are."""
        if why != self.placement.stays:
            self.placement = replace(self.placement, stays=why)

    def say_accumulates(self) -> None:
        """From now on plans count the gradients of micro-batches."""
        if not self.placement.accumulates:
            self.placement = replace(self.placement, accumulates=True)

    def find_gradients(self) -> None:
        """A forward finds gradients on the device: it may from now on."""
        self.say_accumulates()
        if self.compiler.find_gradients():
            self.expire()

    def stay(self, why: str) -> None:
        """Plan again with the buckets where they are, for good. No backward may be to come."""
        self.say_stays(why)
        self.compiler.replan()
        self.expire()
