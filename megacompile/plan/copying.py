"""Gathers or whole copies: how the weights of streamed buckets come to each of several ranks.

    a gather       1/n of the bytes over the link to the host, the rest from the other GPUs
    a whole copy   all bytes over the link to the host, and n times the reads of its memory

All ranks make the same choice, because their collectives depend on it. So each says what it
predicts for both, and which buckets it would stream; what is picked follows from that alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megacompile.plan.planner import Search, SearchResult
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Meet

_PAYS = 0.01  # of a step: what whole copies must save
_NEAR = 0.05  # the plan for gathers, with whole copies, may take so much longer for a search to pay


class Picked(NamedTuple):
    """What ranks have chosen together."""

    whole: frozenset[int]  # keys of the buckets that each copies whole
    found: SearchResult | None  # the fastest plan with that; None: nothing fits
    why: tuple[str, ...]


class _Said(NamedTuple):
    """What a rank says."""

    gathered_s: float  # of a step
    copied_s: float
    streamed: tuple[int, ...]  # keys, where they are copied whole


def pick(
    problem: Problem,
    gathered: SearchResult | None,
    search: Search,
    meet: Meet,
    *,
    wanted: bool,
) -> Picked:
    """Choose together with the other ranks.

    Args:
        problem: with gathers.
        gathered: the fastest plan for it.
        search: finds the fastest choice that fits.
        meet: gives what each rank says.
        wanted: whole copies are to be made, if only they fit.
    """
    keys = frozenset(bucket.key for bucket in problem.buckets)
    copying = problem.copying(keys)
    copied = gathered  # it fits with whole copies too
    gathered_s = math.inf if gathered is None else problem.step_s(gathered.choice)
    copied_s = math.inf if gathered is None else copying.step_s(gathered.choice)
    if wanted or gathered is None or copied_s < gathered_s * (1 + _NEAR):
        copied = search(copying)
        copied_s = math.inf if copied is None else copying.step_s(copied.choice)
    here = keys if copied is None else keys - copied.choice.resident
    each = [_Said(*said) for said in meet(_Said(gathered_s, copied_s, tuple(sorted(here))))]
    whole = frozenset.intersection(*(frozenset(said.streamed) for said in each))
    gathered_s = max(said.gathered_s for said in each)
    copied_s = max(said.copied_s for said in each)
    pays = copied_s < math.inf if wanted else copied_s < gathered_s * (1 - _PAYS)
    if copied is None or not whole or not pays:
        gathered_why = _gathered_why(gathered_s, copied_s, whole)
        return Picked(frozenset(), gathered, (f"buckets are gathered: {gathered_why}",))
    times = f"a step takes {_time(copied_s)}, and {_time(gathered_s)} where they are gathered"
    return Picked(whole, copied, (f"streamed buckets are copied whole: {times}",))


def _gathered_why(gathered_s: float, copied_s: float, whole: frozenset[int]) -> str:
    if not whole:
        return "there is none that all ranks stream"
    if copied_s == math.inf:
        return "with whole copies nothing fits"
    return f"a step takes {_time(gathered_s)}, and {_time(copied_s)} with whole copies"


def _time(step_s: float) -> str:
    return (
        "no time that is known (it does not fit)"
        if step_s == math.inf
        else f"{step_s * 1e3:.0f} ms"
    )
