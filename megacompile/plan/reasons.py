"""The words for a plan that was found, and for one that was not."""

from __future__ import annotations

from megacompile.cost.memory import MemoryMoment
from megacompile.plan.choice import Choice
from megacompile.plan.fit import device_more, device_short
from megacompile.plan.problem import Problem
from megacompile.text import format_bytes


def reasons(
    problem: Problem, best: Choice, step_s: float, tried: dict[Choice, float], peak: int
) -> tuple[str, ...]:
    """The reasons for this plan: what it needs, what it takes, and the floor next to it."""
    budget = format_bytes(problem.budget_bytes)
    lines = [
        f"{best.keep} of {problem.stages} stages are kept and {len(best.resident)} of "
        f"{len(problem.buckets)} buckets live on the device: {format_bytes(peak)} of {budget} of "
        f"device memory, {step_s * 1e3:.0f} ms a step predicted, "
        + (
            f"the fastest of {len(tried)} plans that fit"
            if len(tried) > 1
            else "the only plan tried"
        )
    ]
    floor = {choice: s for choice, s in tried.items() if not choice.resident}
    if best.state_lookahead is not None:
        lines.append(
            f"optimizer states are fetched {best.state_lookahead} stage ahead, later than weights: "
            "they take less memory"
        )
    if floor and best.resident:
        streamed_s = problem.step_s(min(floor, key=floor.__getitem__))
        lines.append(f"with every bucket streamed it would take {streamed_s * 1e3:.0f} ms")
    return tuple(lines)


def table(problem: Problem, peak: MemoryMoment) -> str:
    """Device memory by user, and the memory that there is."""
    needed = sorted(peak.live_bytes.items(), key=lambda item: -item[1])
    rows = [(kind.value, size) for kind, size in needed if size]
    rows += [("needed", peak.total_bytes), ("available", problem.budget_bytes)]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)


def does_not_fit(problem: Problem, choice: Choice, peak: MemoryMoment) -> str:
    """The error of a model for which there is too little device memory.

    Args:
        choice: what comes nearest; its peak is `peak`.
    """
    how = "".join(
        f", {text}"
        for text, holds in (
            (f"{len(choice.resident)} buckets resident", choice.resident),
            (f"the inputs of {choice.offload} stages on the host", choice.offload),
            (f"{choice.rerun} stages run again", choice.rerun),
        )
        if holds
    )
    host, available = format_bytes(problem.host_bytes(choice)), "an unknown amount"
    if problem.host_budget_bytes is not None:
        available = format_bytes(problem.host_budget_bytes)
    needed, budget = peak.total_bytes, problem.budget_bytes
    return "\n".join(
        [
            f"megacompile(): {device_short(needed, budget)}, at {peak.graph} {peak.label}, with "
            f"every stage recomputed{how}",
            table(problem, peak),
            f"(host memory: {host} needed, {available} available)",
            *device_more(needed - budget),
        ]
    )
