"""The choices that a search has simulated, and the moves from one to the next.

Each move starts at a fitting choice and returns the fastest that it found, or the same choice. All
moves share the simulated times. A choice is skipped if its computes alone take longer than the
fastest known step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megacompile.ir.plan import Choice, Places
from megacompile.passes.schedule.make_plan import ROWS
from megacompile.plan.freeing import freed
from megacompile.plan.problem import Problem

_SLOTS = (1, 2, 4, 8, 16)  # beyond the options'
_DELAYS = (1, 2, 4, 8)  # in backwards, of states on their way to the host
_APART = 1 / 24  # of the stages: resolution of the search for stages kept on the host
_FEWER = (0, 1, 2, 3)  # numbers of residents to give up for stages that are kept on the host
_EQUAL = 0.002  # predictions this close count as equal; residents break the tie
_PAYS = 0.01  # of a step's time: the least gain of a move
_IN_VAIN = 3  # numbers of slots tried without a gain before giving up


def between(counts: Sequence[int], at: int) -> set[int]:
    """Midpoints of the nearest interval on each side that has one."""
    k = counts.index(at)
    middles = [(a + b) // 2 for a, b in itertools.pairwise(counts)]
    sides = (middles[:k][::-1], middles[k:])
    return {next((n for n in side if n not in counts), at) for side in sides} - {at}


def _beside(counts: Sequence[int], at: int, least: int) -> list[int]:
    """Midpoints of the two intervals that meet at `at`, if they are at least `least` long."""
    k = counts.index(at)
    near = itertools.pairwise(counts[max(k - 1, 0) : k + 2])
    return [(a + b) // 2 for a, b in near if b - a >= least]


class Tries:
    """The simulated choices of one search.

    Args:
        problem: to solve.
        keeps: the least and the most kept stages.
    """

    def __init__(self, problem: Problem, keeps: tuple[int, int]) -> None:
        self.problem = problem
        self.keeps = keeps
        self.times: dict[Choice, float] = {}  # seconds; the first of equals wins
        self.too_many: set[int] = set()  # counts of resident buckets that do not fit
        self.passed_over: set[int] = set()  # counts whose choices are certainly too slow

    @property
    def best(self) -> Choice:
        """The fastest choice; the streamed one if nothing fits."""
        return min(self.times, key=self.times.__getitem__, default=Choice(0, self.problem.here))

    @property
    def counts(self) -> list[int]:
        """The tried numbers of new residents, including those that do not fit."""
        tried = {self.count(choice) for choice in (*self.times, self.best)}
        return sorted(tried | self.too_many | self.passed_over)

    def count(self, choice: Choice) -> int:
        """Number of new residents."""
        return len(choice.places.resident - self.problem.here.resident)

    def add_everything(self, count: int) -> bool:
        """Simulate the choice that keeps all stages and has all buckets resident, if it fits."""
        choice = self._with(count, 0.0, keep=self.keeps[1])
        everything = len(choice.places.resident) == len(self.problem.buckets)
        return everything and self.problem.fits_exactly(choice) and self._simulate(choice)

    def add_each(self, counts: Iterable[int], shares: Iterable[float]) -> None:
        """Try every combination of numbers of residents and shares of device updates.

        Larger shares generally take more memory, but not always. If one share fits and the next two
        do not, larger ones are skipped.
        """
        for count in counts:
            fits: list[bool] = []
            for share in sorted(shares):
                fits.append(self.add(self._with(count, share)))
                if fits[-3:] == [True, False, False]:
                    break
            if not any(fits):
                self.too_many.add(count)

    def add(self, choice: Choice, *, fewer: bool = True) -> bool:
        """Simulate a choice with as many kept stages as fit; False if it does not fit at all.

        Args:
            fewer: also try keeping fewer stages if copies may bound the step, that is if the
                backward updates or inputs of stages wait on the host; not for stages kept on the
                host.
        """
        problem, (lowest, most) = self.problem, self.keeps
        if choice.saved_on_host:  # without kept stages, none is kept on the host
            lowest, most = 1, max(1, choice.keep)
        elif choice.offload and not fewer:  # kept tensors stay on the device
            most = max(lowest, problem.stages - choice.offload)
        least = problem.settled(replace(choice, keep=lowest))
        if not problem.fits(least):
            return False
        low = problem.most_kept(least, lowest, most)
        low = problem.most_waiting(least, lowest, low)
        fewer = fewer and not choice.saved_on_host
        others = {lowest} if problem.optimizer.in_backward and fewer else set()
        if choice.offload and fewer:
            others |= {lowest + (low - lowest) * k // 4 for k in range(4)}
        known = set(self.times)
        most_kept = self._most_that_fit(least, range(low, lowest - 1, -1))
        for keep in sorted(others - {low}):
            self._simulate(replace(least, keep=keep))
        if most_kept is not None and most_kept in self.times.keys() - known:
            # of equally fast choices the one with fewer kept stages wins: it comes first
            self.times[most_kept] = self.times.pop(most_kept)
        return most_kept is not None

    def _most_that_fit(self, choice: Choice, keeps: range) -> Choice | None:
        """Simulate a choice with as many kept stages as fit. None if even the last of `keeps` is
        too many, because gradients of residents need the memory at the end of the backward."""
        for keep in keeps:
            kept = replace(choice, keep=keep)
            if self._simulate(kept):
                return kept
            last = replace(choice, keep=keeps[-1])
            if keep == keeps[0] and self.problem.peak_bytes(last) > self.problem.budget_bytes:
                return None
        return None

    def add_late_states(self, streamed: Choice, *, resident: bool) -> None:
        """Try states that leave some backwards later, or are fetched only one stage ahead, with the
        fewest residents and with the best choice's number. Late states take slots from residents,
        so with fewer residents they may leave later still.

        Args:
            streamed: with the fewest residents.
            resident: the search chooses the number of residents.
        """

        def add(places: Places, delay: int) -> None:
            late = replace(streamed, places=places, state_delay=delay)
            if not self.add(late):
                self.add(replace(late, state_lookahead=1))

        def look(count: int, before: Choice) -> None:
            places = self.problem.places(count)
            for delay in (before.state_delay, 2 * before.state_delay):
                add(places, delay)

        both = dict.fromkeys((streamed.places, self.best.places))
        for places, delay in itertools.product(both, _DELAYS):
            add(places, delay)
        least = self.count(streamed)
        step = (self.count(self.best) - least) // 2 if resident else 0
        self._climb(step, least, lambda: self.best, look, enough=_EQUAL)

    def _climb(
        self,
        step: int,
        least: int,
        top: Callable[[], Choice],
        look: Callable[[int, Choice], None],
        *,
        enough: float = 0.0,
    ) -> None:
        """Hill climbing over the number of residents: look `step` below and above the fastest while
        that improves it, then halve the step.

        Args:
            step: the first difference, in residents.
            least: the fewest residents.
            top: returns the fastest so far.
            look: simulates choices with a number of residents, given the fastest so far.
            enough: the share of a step that must be saved to repeat the same step size.
        """
        while step > 0:
            before = top()
            for count in (self.count(before) - step, self.count(before) + step):
                if least <= count <= len(self.problem.candidates):
                    look(count, before)
            if self._time(top()) >= self._time(before) * (1 - enough):
                step //= 2

    def add_offloaded(self, choice: Choice, *, resident: bool) -> None:
        """Simulate choices with inputs of stages on the host: with as few as necessary, and with
        more, which may leave memory to keep stages. If stages are kept, numbers in between are
        tried too.

        If the host does not hold these inputs, stages run again instead of having their outputs
        wait, or the waiting tensors go on to a disk (`Tiers.settled`). If nothing fits yet, every
        other stage runs again, then two of three and so on, with as few inputs on the host as
        possible. The freed device memory is used for residents.

        Args:
            resident: more buckets may become resident.
        """
        problem = self.problem
        few = problem.fewest_offloaded(choice)
        some = () if few is None else (few, (few + problem.stages) // 2, problem.stages)
        for count in sorted(set(some)):
            waiting = replace(choice, offload=count)
            self._add_with_residents(waiting, resident=resident)
            again = problem.fewest_reruns(waiting)
            if again is None:  # the host holds too little: the rest goes to a disk
                again = problem.reruns(1)
            if again:
                self.add(replace(waiting, rerun=again))
        if some and self.best.keep > 1 and self.best.offload in some:
            for count in between(sorted(set(some)), self.best.offload):
                self.add(replace(self.best, offload=count), fewer=False)
        for row in () if self.times else ROWS:
            rerun = replace(choice, rerun=problem.reruns(row))
            fewer = problem.fewest_offloaded(rerun)
            for count in sorted({0, fewer or 0}):
                self._add_with_residents(replace(rerun, offload=count), resident=resident)

    def _add_with_residents(self, choice: Choice, *, resident: bool) -> None:
        """Simulate a choice with as few residents as necessary for the others to fit elsewhere, and
        with as many as fit, which leave less work to a disk. Residents need no slots, so a few more
        than estimated may fit."""
        problem = self.problem
        if not resident:
            self.add(choice)
            return
        both = (problem.fewest_residents(choice), problem.most_residents(choice))
        counts = sorted({count for count in both if count is not None})
        for count in counts:
            self.add(replace(choice, places=problem.places(count)))
        for count in range(counts[-1] + 1 if counts else 0, len(problem.candidates) + 1):
            if not self._add_exactly(choice, problem.places(count)):
                break

    def _add_exactly(self, choice: Choice, places: Places) -> bool:
        """Simulate a choice that may fit although the estimate says otherwise, with one kept stage
        or none."""
        problem, (lowest, most) = self.problem, self.keeps
        least, more = (
            problem.settled(replace(choice, places=places, keep=keep))
            for keep in (lowest, min(lowest + 1, most))
        )
        if not problem.fits_exactly(least):
            return False
        return any(problem.fits_exactly(exact) and self._simulate(exact) for exact in (more, least))

    def _with(self, count: int, share: float, *, keep: int = 1) -> Choice:
        """The choice with `count` new residents and a share of device updates."""
        choice = self.problem.with_residents(count, keep=keep)
        others = len(choice.places) < len(self.problem.buckets)  # streamed, entirely on the host
        return replace(choice, device_update=share if others else 0.0)

    def _simulate(self, choice: Choice) -> bool:
        """Record a choice's time; False if it does not fit after all, because `fits` only
        estimates."""
        if choice not in self.times:
            if self.problem.least_s(choice) > self._enough_s(choice):  # by its computes alone
                self.passed_over.add(self.count(choice))
                return True
            expected_s = self._expected_s(choice)
            if expected_s is None:
                return False
            self.times[choice] = expected_s
        return True

    def _enough_s(self, choice: Choice) -> float:
        """Upper bound in seconds: a slower choice is neither chosen nor reported."""
        known = self.times.items()
        none = not choice.places.resident
        likes = (s for other, s in known if not (none and other.places.resident))
        return min(likes, default=math.inf) * (1 + _EQUAL)

    def _expected_s(self, choice: Choice) -> float | None:
        """A choice's expected time; None if it does not fit. If it is already too slow on the
        measured host, the slower host is not simulated."""
        problem = self.problem
        if not problem.fits_host(choice) or problem.peak_bytes(choice) > problem.budget_bytes:
            return None
        step_s = problem.step_s(choice)
        return step_s if step_s > self._enough_s(choice) else problem.expected_s(choice)

    def surest(self) -> Choice:
        """The choice with the most residents among those as fast as the fastest."""
        least = min(self.times.values()) * (1 + _EQUAL)
        fast = [choice for choice, step_s in self.times.items() if step_s <= least]
        return max(fast, key=lambda choice: (len(choice.places.resident), -self.times[choice]))

    def with_halves(self, best: Choice, *, resident: bool) -> Choice:
        """Keep half of some stages' saved tensors if it pays off: more stages fit, and the dropped
        half is cheap to recompute. Other numbers of residents are tried with it.

        Args:
            resident: the search chooses the number of residents.
        """
        if best.keep == self.problem.stages:
            return best  # nothing is computed again
        at, before = self.count(best), self.times[best]
        found = {at: self._in_halves(best, at)}

        def top() -> Choice:
            return min(found.values(), key=self._time)

        def look(count: int, _: Choice) -> None:
            if count not in found:
                found[count] = self._in_halves(best, count)

        if self._time(top()) >= before * (1 - _EQUAL):
            return best
        if resident:
            self._climb(max(1, at // 4), self.problem.fewest_residents(best) or 0, top, look)
        return top() if self._time(top()) < before * (1 - _PAYS) else best

    def _in_halves(self, best: Choice, count: int) -> Choice:
        """The fastest choice in halves with `count` residents; an unsimulated one if nothing
        fits."""
        before = set(self.times)
        halves = replace(best, places=self.problem.places(count), halves=True)
        self.add(halves)
        return self._fastest_since(before, halves)

    def _fastest_since(self, before: set[Choice], default: Choice) -> Choice:
        """The fastest choice simulated since `before`; the first of equals, so that runs are
        deterministic."""
        new = (choice for choice in self.times if choice not in before)
        return min(new, key=self.times.__getitem__, default=default)

    def _time(self, choice: Choice) -> float:
        """Seconds of a simulated choice; infinite for others."""
        return self.times.get(choice, math.inf)

    def with_memory_freed(self, best: Choice, *, resident: bool) -> Choice:
        """Free device memory for more residents or kept stages, if that pays off: the inputs of
        recomputed stages wait on the host or are recomputed.

        Args:
            resident: the search chooses the number of residents.
        """
        before = self.times[best]
        for choice in freed(self.problem, best, before, resident=resident):
            self.add(choice, fewer=False)
        fastest = self.best
        return fastest if self._time(fastest) < before * (1 - _PAYS) else best

    def with_saved_on_host(self, best: Choice) -> Choice:
        """Keep as many stages on the host as pays off. Half of the stages not yet kept are tried
        first, so that copied and recomputed stages alternate. If that does not fit, more are tried,
        because evenly spread they may hold less device memory while they are copied. The freed
        memory keeps more stages on the device."""
        count = (self.problem.stages - best.keep) // 2
        most = self.problem.most_on_host(best)
        times, choices = {0: self.times[best], self.problem.stages - best.keep: math.inf}, {0: best}

        def tried(n: int) -> bool:
            found = self.kept_on_host(best, n)
            choices[n], times[n] = found, self._time(found)
            return found.saved_on_host > 0

        def fastest() -> int:
            return min(times, key=times.__getitem__)

        counts = (count, most // 2, most, *(count >> k for k in range(1, count.bit_length())))
        first = next((n for n in dict.fromkeys(counts) if n and tried(n)), 0)
        least = max(2, round(self.problem.stages * _APART))
        while first and (middles := _beside(sorted(times), fastest(), least)):
            for n in middles:
                tried(n)
        if times[fastest()] >= times[0] * (1 - _PAYS):
            return best
        return self._with_more_kept(choices[fastest()])

    def _with_more_kept(self, best: Choice) -> Choice:
        """Keep more stages on the device, in memory freed by stages kept on the host."""
        again = self.problem.again(best)
        left = self.problem.budget_bytes - self.problem.peak_bytes(best)
        if again is None or again[1] > left:
            return best
        more = min(int(left // again[1]), self.problem.stages - best.saved_on_host - best.keep)
        self.add(replace(best, keep=best.keep + more))
        return min((best, self.best), key=self.times.__getitem__)

    def kept_on_host(self, best: Choice, count: int) -> Choice:
        """The fastest choice with `count` stages kept on the host and a few residents fewer, if
        necessary; `best` if nothing fits."""
        before = set(self.times)
        for fewer in _FEWER[: self.count(best) + 1]:
            places = self.problem.places(self.count(best) - fewer)
            if self.add(replace(best, places=places, saved_on_host=count)):
                return self._fastest_since(before, best)
        return best

    def with_more_slots(self, best: Choice) -> Choice:
        """Add as many slots as fit and pay off; several may pay off even if one does not."""
        in_vain = 0
        for more in _SLOTS:
            choice = replace(best, more_slots=more)
            resident = len(best.places.resident)
            if resident + more >= len(self.problem.buckets) or in_vain == _IN_VAIN:
                break
            step_s = self._expected_s(choice)
            if step_s is None:
                break
            if step_s > self.times[best] * (1 - _PAYS):
                in_vain += 1
                continue
            in_vain = 0
            self.times[choice] = step_s
            best = choice
        return best
