"""The points that are measured, their order, and what is done about each.

At one setting the systems take turns, A B C A B C, so that a machine that slows down slows all of
them. A point that failed is not repeated. Of a system that was too large, nothing larger is tried.
All turns of a setting are of one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.outcome import TOO_LARGE, Outcome, Status
from benchmarks.peers.store import Record, Results
from benchmarks.peers.work import MODELS, Point, Setting

LEAST_S = 15.0  # a process that has less is not started

Launch = Callable[[Point, float], Outcome]  # a point, within so many seconds


def settings(
    models: Sequence[str],
    tokens: Sequence[tuple[int, int]],
    caps_gib: Sequence[float | None],
    *,
    grid: bool = False,
) -> list[Setting]:
    """The first of each, and the others of one while the rest stay; with `grid` all combinations.

    Args:
        models: keys of MODELS.
        tokens: (batch, length).
        caps_gib: of GPU memory; None: all of it.
        grid: all combinations.
    """
    if grid:
        return [Setting(m, *t, c) for m in models for t in tokens for c in caps_gib]
    first = Setting(models[0], *tokens[0], caps_gib[0])
    return [
        first,
        *(replace(first, cap_gib=cap) for cap in caps_gib[1:]),
        *(replace(first, batch=b, length=n) for b, n in tokens[1:]),
        *(replace(first, model=model) for model in models[1:]),
    ]


def points(of: Sequence[Setting], peers: Sequence[str], repeats: int) -> list[Point]:
    """All repeats of a setting, before the next one."""
    return [Point(s, peer, k) for s in of for k in range(repeats) for peer in peers]


def go(
    results: Results,
    path: Path,
    launch: Launch,
    *,
    limit_s: float,
    total_s: float,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Measure what is planned and has no record; gives whether nothing is left.

    Args:
        results: of this run and those before; each new record is saved.
        path: of the file.
        launch: measures a point.
        limit_s: of one process, beside what its `Peer` needs to build.
        total_s: of all of them.
        say: is told of each point.
        clock: in seconds.
    """
    stop = clock() + total_s
    for point in results.planned:
        if results.of(point) is not None or _failed(results, point) is not None:
            continue
        outcome = _known(results, point)
        if outcome is None:
            left = stop - clock()
            own_s = limit_s + PEERS[point.peer].build_s
            outcome = launch(point, min(own_s, left)) if left >= LEAST_S else None
            if outcome is None or (outcome.status is Status.TIMED_OUT and left < own_s):
                say(f"stopped: {total_s / 60:.3g} minutes are over; --continue goes on")
                return False
        results.add(point, outcome)
        results.save(path)
        say(line(point, outcome))
    return True


def forget(results: Results, statuses: Sequence[Status], *, everywhere: bool) -> None:
    """Retry points that ended so; `everywhere`: on whichever machine they did."""
    results.records = [
        r
        for r in results.records
        if r.outcome.status not in statuses or not (everywhere or results.is_here(r))
    ]


def keep_apart(results: Results) -> list[str]:
    """Drop turns of other machines that turns of this one would stand beside; gives what to say.

    A setting for which nothing is left to do stays as it is, if one machine has measured it.
    """
    lines = []
    for setting in dict.fromkeys(point.setting for point in results.planned):
        points = [point for point in results.planned if point.setting == setting]
        records = [r for r in results.records if r.point.setting == setting]
        away = [r for r in records if not results.is_here(r)]
        done = all(results.of(p) is not None or _failed(results, p) is not None for p in points)
        if not away or (done and all(results.same_machine(r.run, away[0].run) for r in records)):
            continue
        results.records = [r for r in results.records if r not in away]
        run = results.runs[away[0].run]
        where = f"{run['gpu']}, {run['cpus']} CPU cores, {run['host GiB']} GiB of host memory"
        lines.append(
            f"{setting.text}: measured again, because {len(away)} of its turns are of another "
            f"machine ({where})"
        )
    return lines


def line(point: Point, outcome: Outcome) -> str:
    """The line that is printed for a point."""
    said = outcome.reason
    if outcome.result is not None:
        said = f"{outcome.result['step_s']:.4g} s a step, losses from "
        said += f"{outcome.result['losses'][0]:.4f} to {outcome.result['losses'][-1]:.4f}"
    who = f"{point.setting.text}, {point.peer} #{point.repeat + 1}"
    return f"{who}: {outcome.status.value}: {said} [{outcome.process_s:.0f} s]"


def _failed(results: Results, point: Point) -> Record | None:
    """An earlier repeat that did not measure."""
    same = (r for r in results.records if _alike(r.point, point))
    return next((r for r in same if r.outcome.status is not Status.OK), None)


def _alike(one: Point, other: Point) -> bool:
    return (one.peer, one.setting) == (other.peer, other.setting)


def _known(results: Results, point: Point) -> Outcome | None:
    """The outcome of a point that is known before it is tried."""
    for record in results.records:
        if record.point.peer != point.peer or not results.is_here(record):
            continue
        outcome = record.outcome
        if outcome.status is Status.NOT_INSTALLED:
            return replace(outcome, process_s=0.0)
        if outcome.status in TOO_LARGE and at_least_as_large(point.setting, record.point.setting):
            reason = f"{outcome.status.value} at {record.point.setting.text}"
            return Outcome(Status.NOT_TRIED, reason, package=outcome.package)
    return None


def at_least_as_large(one: Setting, other: Setting) -> bool:
    """True if `one` needs as much as `other`, or has less memory for it."""
    order = list(MODELS)
    limits = [float("inf") if s.cap_gib is None else s.cap_gib for s in (one, other)]
    return (
        order.index(one.model) >= order.index(other.model)
        and one.batch >= other.batch
        and one.length >= other.length
        and limits[0] <= limits[1]
    )
