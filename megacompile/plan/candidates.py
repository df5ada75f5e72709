"""The choices that a search has simulated, and the moves from one to the next.

Each move starts at a fitting choice and returns the fastest that it found, or the same choice. All
moves share the simulated times. A choice is skipped if its computes alone take longer than the
fastest known step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megacompile.ir.plan import Choice
from megacompile.passes.schedule.make_plan import ROWS
from megacompile.plan.problem import Problem

_SLOTS = (1, 2, 4, 8, 16)  # beyond the options'
_DELAYS = (1, 2, 4, 8)  # in backwards, of states on their way to the host
_APART = 1 / 24  # of the stages: resolution of the search for stages kept on the host
_FEWER = (0, 1, 2, 3)  # numbers of residents to give up for stages that are kept on the host
_EQUAL = 0.002  # predictions this close count as equal; residents break the tie
_PAYS = 0.01  # of a step's time: the least gain of a move
_MUCH = 0.03  # the same, if inputs are recomputed or other updates move to the device


def _beside(counts: Sequence[int], at: int, least: int) -> list[int]:
    """Midpoints of the two intervals that meet at `at`, if they are at least `least` long."""
    k = counts.index(at)
    near = itertools.pairwise(counts[max(k - 1, 0) : k + 2])
    return [(a + b) // 2 for a, b in near if b - a >= least]


class Candidates:
    """The simulated choices of one search.

    Args:
        problem: to solve.
        keeps: the least and the most kept stages.
        resident: the search chooses the number of residents.
    """

    def __init__(self, problem: Problem, keeps: tuple[int, int], *, resident: bool) -> None:
        self.problem = problem
        self.keeps = keeps
        self.resident = resident
        self.times: dict[Choice, float] = {}  # seconds; the first of equals wins
        self.counts: set[int] = set()  # of new residents, that `add_each` has tried

    @property
    def best(self) -> Choice:
        """The fastest choice; the streamed one if nothing fits."""
        return min(self.times, key=self.times.__getitem__, default=Choice(0, self.problem.here))

    def count(self, choice: Choice) -> int:
        """Number of new residents."""
        return len(choice.places.resident - self.problem.here.resident)

    def add_everything(self) -> bool:
        """Simulate the choice that keeps all stages and has all buckets resident, if it fits."""
        count = len(self.problem.candidates) if self.resident else 0
        choice = self.problem.with_residents(count, keep=self.keeps[1])
        everything = len(choice.places.resident) == len(self.problem.buckets)
        return everything and self.problem.fits_exactly(choice) and self._simulate(choice)

    def add_each(self, counts: Iterable[int], shares: Iterable[float]) -> None:
        """Try every combination of numbers of residents and shares of device updates."""
        for count in counts:
            self.counts.add(count)
            choice = self.problem.with_residents(count)
            streams = len(choice.places) < len(self.problem.buckets)  # some, without a disk
            for share in sorted(shares) if streams else [0.0]:
                self.add(replace(choice, device_update=share))

    def middles(self) -> list[int]:
        """Numbers of residents in the middle of the nearest untried interval on each side of the
        best one."""
        at = self.count(self.best)
        counts = sorted(self.counts | {at})
        middles = [(a + b) // 2 for a, b in itertools.pairwise(counts)]
        k = counts.index(at)
        sides = (middles[:k][::-1], middles[k:])
        found = (next((n for n in side if n not in counts), at) for side in sides)
        return sorted({*found} - {at})

    def add(self, choice: Choice) -> bool:
        """Simulate a choice with as many kept stages as fit; False if it does not fit at all."""
        problem, (lowest, most) = self.problem, self.keeps
        if choice.saved_on_host:  # without kept stages, none is kept on the host
            lowest, most = 1, max(1, choice.keep)
        elif choice.offload and choice.keep:  # kept tensors stay on the device
            most = max(lowest, problem.stages - choice.offload)
        least = problem.settled(replace(choice, keep=lowest))
        if not problem.fits(least):
            return False
        if problem.optimizer.in_backward and not choice.saved_on_host:
            self._simulate(least)  # copies may bound the step
        low = problem.most_kept(least, lowest, most)
        for keep in range(low, lowest - 1, -1):
            if self._simulate(replace(least, keep=keep)):
                return True
            if keep == low and problem.peak_bytes(least) > problem.budget_bytes:
                return False  # gradients of residents need the memory at the backward's end
        return False

    def add_late_states(self, streamed: Choice) -> None:
        """Try states that leave some backwards later, or are fetched only one stage ahead, with the
        fewest residents (`streamed`) and with the best choice's number. Late states take slots from
        residents, so with fewer residents they may leave later still."""

        def look(count: int, delays: Iterable[int]) -> Choice:
            for delay in delays:
                late = replace(streamed, places=self.problem.places(count), state_delay=delay)
                if not self.add(late):
                    self.add(replace(late, state_lookahead=1))
            return self.best

        least, at = self.count(streamed), self.count(self.best)
        for count in dict.fromkeys((least, at)):
            look(count, _DELAYS)
        step, twice = (self.count(self.best) - least) // 2, (1, 2)
        self._climb(self.best, step, lambda n, now: look(n, (k * now.state_delay for k in twice)))

    def _climb(self, best: Choice, step: int, look: Callable[[int, Choice], Choice]) -> Choice:
        """Hill climbing over the number of residents: look `step` below and above while that is
        faster, then halve the step.

        Args:
            look: returns the fastest choice with a number of residents, given the best one.
        """
        least = self.problem.fewest_residents(best) or 0
        while self.resident and step > 0:
            counts = (self.count(best) - step, self.count(best) + step)
            fits = (n for n in counts if least <= n <= len(self.problem.candidates))
            faster = min([best, *(look(n, best) for n in fits)], key=self._time)
            if self._time(faster) >= self._time(best) * (1 - _EQUAL):
                step //= 2
            best = faster
        return best

    def add_offloaded(self, choice: Choice) -> None:
        """Simulate choices with inputs of stages on the host: with as few as necessary, and with
        more, which may leave memory to keep stages.

        If the host does not hold these inputs, stages run again instead of having their outputs
        wait, or the waiting tensors go on to a disk (`Tiers.settled`). If nothing fits yet, every
        other stage runs again, then two of three and so on, with as few inputs on the host as
        possible. The freed device memory is used for residents.
        """
        problem = self.problem
        few = problem.fewest_offloaded(choice)
        some = () if few is None else (few, (few + problem.stages) // 2, problem.stages)
        for count in sorted(set(some)):
            waiting = replace(choice, offload=count)
            self._add_with_residents(waiting)
            again = problem.fewest_reruns(waiting)
            if again is None:  # the host holds too little: the rest goes to a disk
                again = problem.reruns(1)
            if again:
                self.add(replace(waiting, rerun=again))
        for row in () if self.times else ROWS:
            rerun = replace(choice, rerun=problem.reruns(row))
            fewer = problem.fewest_offloaded(rerun)
            for count in sorted({0, fewer or 0}):
                self._add_with_residents(replace(rerun, offload=count))

    def _add_with_residents(self, choice: Choice) -> None:
        """Simulate a choice with as few residents as necessary for the others to fit elsewhere, and
        with as many as fit, which leave less work to a disk."""
        problem = self.problem
        if not self.resident:
            self.add(choice)
            return
        both = (problem.fewest_residents(choice), problem.most_residents(choice))
        for count in sorted({count for count in both if count is not None}):
            self.add(replace(choice, places=problem.places(count)))

    def _simulate(self, choice: Choice) -> bool:
        """Record a choice's time; False if it does not fit after all, because `Problem.fits` only
        estimates."""
        if choice not in self.times:
            if self.problem.least_s(choice) > self._enough_s():  # by its computes alone
                return True
            expected_s = self._expected_s(choice)
            if expected_s is None:
                return False
            self.times[choice] = expected_s
        return True

    def _enough_s(self) -> float:
        """Upper bound in seconds: a slower choice is not chosen."""
        return min(self.times.values(), default=math.inf) * (1 + _EQUAL)

    def _expected_s(self, choice: Choice) -> float | None:
        """A choice's expected time; None if it does not fit. If it is already too slow on the
        measured host, the slower host is not simulated."""
        problem = self.problem
        if not problem.fits_host(choice) or problem.peak_bytes(choice) > problem.budget_bytes:
            return None
        step_s = problem.step_s(choice)
        return step_s if step_s > self._enough_s() else problem.expected_s(choice)

    def surest(self) -> Choice:
        """The choice with the most residents among those as fast as the fastest."""
        fast = [choice for choice, step_s in self.times.items() if step_s <= self._enough_s()]
        return max(fast, key=lambda choice: (len(choice.places.resident), -self.times[choice]))

    def _time(self, choice: Choice) -> float:
        """Seconds of a simulated choice; infinite for others."""
        return self.times.get(choice, math.inf)

    def _fastest_of(self, choices: Iterable[Choice], default: Choice) -> Choice:
        """Try choices; the fastest of those that this simulates, the first of equals."""
        before = set(self.times)
        for choice in choices:
            self.add(choice)
        new = (choice for choice in self.times if choice not in before)
        return min(new, key=self.times.__getitem__, default=default)

    def with_halves(self, best: Choice) -> Choice:
        """Keep half of some stages' saved tensors if it pays off: more stages fit, and the dropped
        half is cheap to recompute. Other numbers of residents are tried with it."""
        at, before = self.count(best), self.times[best]

        def look(count: int, _: Choice) -> Choice:
            halves = replace(best, places=self.problem.places(count), halves=True)
            return self._fastest_of([halves], halves)

        if best.keep == self.problem.stages:
            return best  # nothing is computed again
        found = look(at, best)
        if self._time(found) >= before * (1 - _EQUAL):
            return best
        found = self._climb(found, max(1, at // 4), look)
        return found if self._time(found) < before * (1 - _PAYS) else best

    def with_memory_freed(self, best: Choice) -> Choice:
        """Free device memory that a fitting plan does not have to free, for more residents or kept
        stages, if that pays off: inputs of recomputed stages wait on the host or are recomputed.

        Without this, a device on which a plan just fits would get a slower plan than a smaller one,
        which has to free memory.
        """
        before = self.times[best]
        for choice in self._freed(best, before):
            self.add(choice)
        return self.best if self._time(self.best) < before * (1 - _PAYS) else best

    def _freed(self, best: Choice, step_s: float) -> Iterator[Choice]:
        """Choices that may be faster, each using the freed memory in a different way. Bounds on the
        gain come first, from known plans; if they are too small, no draft is built."""
        problem = self.problem
        if best.offload or best.rerun or best.keep == problem.stages:
            return
        waiting = replace(best, offload=problem.stages - best.keep)
        size = sum(size for _, size in problem.drafts.waiting(replace(waiting, keep=0)))
        if (again := problem.again(best)) is not None:
            stage_s, stage_bytes = again
            stages = min(waiting.offload, -int(-size // stage_bytes))
            if stages * stage_s > _PAYS * step_s:
                yield replace(best, offload=max(1, waiting.offload - stages))
        if not self.resident:
            return
        # residents need no copies and no host updates; computes take as long as before
        streamed = [b.key for b in problem.candidates if b.key not in best.places.resident]
        share = size / max(1.0, problem.resident_bytes(streamed, gradients=False))
        gain_s = min(step_s - problem.least_s(best), share * step_s)
        ways = [waiting] if gain_s > _PAYS * step_s else []
        if gain_s > _MUCH * step_s:
            ways += [replace(waiting, device_update=0.0)] if best.device_update else []
            if rerun := problem.reruns(1):
                run_again = replace(best, rerun=rerun, keep=0, device_update=0.0)
                ways += [run_again, replace(run_again, offload=problem.stages)]
        for way in ways:
            most = problem.most_residents(way) or 0
            if most > self.count(way):
                yield replace(way, places=problem.places(most))

    def with_saved_on_host(self, best: Choice) -> Choice:
        """Keep as many stages on the host as pays off. Half of the stages not yet kept are tried
        first, so that copied and recomputed stages alternate. If that does not fit, more are tried,
        because evenly spread they may hold less device memory while they are copied."""
        count = (self.problem.stages - best.keep) // 2
        most = self.problem.most_on_host(best)
        times, choices = {0: self.times[best], self.problem.stages - best.keep: math.inf}, {0: best}

        def tried(n: int) -> bool:
            choices[n] = self._kept_on_host(best, n)
            times[n] = self._time(choices[n])
            return choices[n].saved_on_host > 0

        def fastest() -> int:
            return min(times, key=times.__getitem__)

        counts = (count, most // 2, most, *(count >> k for k in range(1, count.bit_length())))
        first = next((n for n in dict.fromkeys(counts) if n and tried(n)), 0)
        least = max(2, round(self.problem.stages * _APART))
        while first and (middles := _beside(sorted(times), fastest(), least)):
            for n in middles:
                tried(n)
        return choices[fastest()] if times[fastest()] < times[0] * (1 - _PAYS) else best

    def _kept_on_host(self, best: Choice, count: int) -> Choice:
        """The fastest choice with `count` stages kept on the host and a few residents fewer, if
        necessary; `best` if nothing fits."""
        for fewer in _FEWER[: self.count(best) + 1]:
            places = self.problem.places(self.count(best) - fewer)
            more = replace(best, places=places, saved_on_host=count)
            if (found := self._fastest_of([more], best)) is not best:
                return found
        return best

    def with_more_slots(self, best: Choice) -> Choice:
        """Add as many slots as fit and pay off; several may pay off even if one does not."""
        for more in _SLOTS:
            choice = replace(best, more_slots=more)
            if len(best.places.resident) + more >= len(self.problem.buckets):
                break
            step_s = self._expected_s(choice)
            if step_s is None:
                break
            if step_s <= self.times[best] * (1 - _PAYS):
                self.times[choice] = step_s
                best = choice
        return best
