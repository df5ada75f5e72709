"""The planner of a model's schedules, and the bucket placement that they assume."""

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
    """Plans and lowers schedules; implemented by `megacompile.plan.compiler`."""

    def partition(self, capture: Capture) -> Schedule:
        """Divide a captured graph into stages."""

    def resized(self, stages: Schedule, values: Values) -> Schedule:
        """The stages for other values of their symbols."""

    def choose(
        self,
        stages: Schedule,
        capture: Capture,
        variant: Variant,
        placement: Placement,
        *,
        again: bool = False,
    ) -> Placement:
        """Choose the plan that `plan` builds; returns the placement that all plans so far want.
        With `again`, buckets may leave the device."""

    def plan(
        self, stages: Schedule, capture: Capture, variant: Variant, placement: Placement
    ) -> Schedule:
        """The verified schedule without code, for the current placement."""

    def lower(self, schedule: Schedule) -> Schedule:
        """Lower a schedule returned by `plan`."""

    def code_is_ready(self) -> bool:
        """True if compiled code is ready for schedules that run without it."""

    def load_code(self, patience_s: float) -> bool:
        """Load it, within a time limit. True if all of it is loaded."""

    def use_code(self) -> None:
        """Switch to the loaded code. No backward may be pending."""

    def wants(self, placement: Placement) -> Placement:
        """The placement that the plans so far want; the buckets are at `placement` now."""

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Note that uncaptured code reads these buckets; they may become resident."""

    def replan(self) -> None:
        """Choose all plans again for the current placement. No backward may be pending."""

    def find_gradients(self) -> bool:
        """Expect a forward to find gradients of resident buckets on the device. True if all plans
        are chosen again because they leave no memory for these gradients."""

    def step_down(self) -> str:
        """Make smaller plans from now on; returns how, or "" if nothing is left to free."""

    def needs(self) -> str:
        """Device memory of the smallest plan, as a table; "" if not known."""

    def retain(self, stages: Collection[Schedule], schedules: Collection[Schedule]) -> None:
        """Drop everything except these results of `partition` and `build`."""

    def rest(self, buckets: Sequence[Bucket], placement: Placement) -> Schedule:
        """A schedule that only updates these buckets, at their current placement."""


class MovesFirst(BaseException):
    """Buckets move before a captured graph runs for the first time, and the call begins again.

    A BaseException, so that user code in between that catches `Exception` does not see it.

    Args:
        lacking: the error to raise if the buckets cannot move. None: they can, because no part of
            the call has run.
    """

    def __init__(self, lacking: DeviceMemoryError | None = None) -> None:
        super().__init__()
        self.lacking = lacking


class Plans:
    """The plans of a model for one layout of its buckets.

    Args:
        compiler: the compiler for the buckets' units.
        placement: the current placement of the buckets.
    """

    def __init__(self, compiler: Compiler, placement: Placement) -> None:
        self.compiler = compiler
        self.placement = placement
        self.version = 0  # plans of older versions are planned again at their next use

    def expire(self) -> None:
        """Make every captured graph plan again at its next call."""
        self.version += 1

    def choose(
        self, stages: Schedule, capture: Capture, variant: Variant, *, again: bool = False
    ) -> Placement:
        """Choose the plan that `plan` builds; returns the wanted placement.

        Args:
            again: buckets may leave the device, even if a plan for smaller inputs put them there.
        """
        return self.compiler.choose(stages, capture, variant, self.placement, again=again)

    def plan(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """A schedule without code, for the current placement."""
        return self.compiler.plan(stages, capture, variant, self.placement)

    def rest(self, buckets: Sequence[Bucket]) -> Schedule:
        """A schedule that only updates these buckets, at their current placement."""
        return self.compiler.rest(buckets, self.placement)

    @property
    def wanted(self) -> Placement:
        """The placement of the buckets and their states from the next call on."""
        return self.compiler.wants(self.placement)

    def note_fetches(self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]]) -> None:
        """Note that uncaptured code reads these buckets; they may become resident.

        Args:
            trained: the parameters that get a gradient: bucket key -> indices.
        """
        self.compiler.note_fetches(buckets, trained, self.placement)

    def moved(self, placement: Placement) -> None:
        """Record the new placement: every captured graph plans again."""
        self.placement = placement
        self.expire()

    def say_stays(self, why: str) -> None:
        """Record why buckets cannot move; plans report it from now on."""
        if why != self.placement.stays:
            self.placement = replace(self.placement, stays=why)

    def say_accumulates(self) -> None:
        """Count the gradients of micro-batches in plans from now on."""
        if not self.placement.accumulates:
            self.placement = replace(self.placement, accumulates=True)

    def find_gradients(self) -> None:
        """Record that a forward finds gradients on the device."""
        self.say_accumulates()
        if self.compiler.find_gradients():
            self.expire()

    def stay(self, why: str) -> None:
        """Plan again and keep the current placement permanently. No backward may be pending."""
        self.say_stays(why)
        self.compiler.replan()
        self.expire()
