"""Schedules of a step in the middle of training, of a model that has no buckets to move."""

from __future__ import annotations

from megacompile.ir.capture import Capture, Variant
from megacompile.ir.plan import Placement
from megacompile.ir.schedule import Schedule
from megacompile.plan.compiler import PassCompiler


class SettledPlans:
    """Plans with the buckets where plans want them, as a model's calls after the first have it.

    Args:
        compiler: makes the plans.
        placement: where the buckets are at first.
    """

    def __init__(self, compiler: PassCompiler, placement: Placement | None = None) -> None:
        self.compiler = compiler
        self.placement = placement or Placement()

    def schedule(
        self, stages: Schedule, capture: Capture, variant: Variant, *, draft: bool = False
    ) -> Schedule:
        """The schedule for buckets that are where it wants them; `draft` as in `plan`."""
        wants = self.compiler.choose(stages, capture, variant, self.placement)
        if wants != self.placement:
            self.placement = wants
            self.compiler.replan()
        return self.compiler.plan(stages, capture, variant, wants, draft=draft)

    def choose_least(self, stages: Schedule, reason: str) -> None:
        """Plan these stages with what comes nearest to the budgets, though that is too much."""
        self.placement = self.compiler.wants(self.placement)
        self.compiler.chooser.choose_least(stages, self.placement, reason)
