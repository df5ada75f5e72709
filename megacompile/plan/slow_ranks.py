"""Ranks that the others wait for: by the rates that plans are made with, and by a trace of all.

Plans are made with the slowest rates of all ranks. The simulation says what a slow rank costs: it
runs the same step with the rate that the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacompile.cost.ranks import FELT, RankRates, SlowRate, slow_rates
from megacompile.plan.report import duration
from megacompile.plan.scenario import Scenario
from megacompile.tracing.critical_path import NONE, LastRank

_SHORTER = 0.01  # of a step; the text leaves out what costs less


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rate at which ranks are behind, and what that costs."""

    rate: SlowRate
    shorter: float  # the share by which a step is shorter at the others' rate, by prediction

    @property
    def matters(self) -> bool:
        """True if the step waits for it."""
        return self.shorter >= _SHORTER

    def text(self, *, with_host: bool) -> str:
        """ "3 (host b): matrix products at 610 TFLOP/s where the others reach 655; ..."."""
        rate = self.rate
        who = ", ".join(map(str, rate.ranks)) + _hosts(rate.hosts if with_host else ())
        reach = "take" if rate.unit == "us" else "reach"
        return (
            f"{who}: {rate.name} at {rate.value:.3g} {rate.unit} where the others {reach} "
            f"{rate.median:.3g}; at that a step would be {self.shorter:.0%} shorter"
        )


def slow_ranks(now: Scenario, ranks: Sequence[RankRates]) -> tuple[SlowRank, ...]:
    """The rates at which ranks are behind the others, the most costly first; the step is `now`."""
    found = []
    for rate in slow_rates(ranks):
        step_s = now.timeline(rate.at_median(now.hardware)).step_s
        found.append(SlowRank(rate, max(0.0, 1 - step_s / now.step_s) if now.step_s else 0.0))
    return tuple(sorted(found, key=lambda each: -each.shorter))


def last_text(last: LastRank, *, with_host: bool) -> str:
    """ "3 (host b) came last in 5 of 6 traced steps: ..."."""
    who = f"{last.rank}" + _hosts((last.host,) if with_host else ())
    if last.lane == NONE:
        why = "no recorded op of it takes longer than those of the others: its host has other work"
    else:
        why = (
            f"its {last.lane} is busy for {duration(last.busy_s)} a step where the others' is for "
            f"{duration(last.others_busy_s)}"
        )
    waits = f"the others wait {duration(last.waited_s)} a step longer in collectives"
    return f"{who} came last in {last.steps} of {last.of} traced steps: {why}; {waits}"


def is_felt(last: LastRank) -> bool:
    """True if the others wait long enough for it."""
    return last.waited_s > FELT * last.step_s


def _hosts(hosts: Sequence[str]) -> str:
    return f" (host {', '.join(hosts)})" if hosts else ""
