"""The choices that a search has simulated, and the moves from one to the next.

Each move starts at a fitting choice and returns the fastest that it found, or the same choice. A
choice is skipped if its computes alone take longer than the fastest known step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from megacompile.ir.plan import Choice
from megacompile.plan.problem import Problem

_DELAYS = (1, 2, 4, 8)  # number of backwards that the copy of states to the host may take
_APART = 1 / 24  # of the stages: resolution of the search for the number kept on the host
_FEWER = (0, 1, 2, 3)  # numbers of residents to give up for stages that are kept on the host
_EQUAL = 0.002  # predictions this close count as equal; residents break the tie
_PAYS = 0.01  # of a step's time: the least gain of a move
_MUCH = 0.03  # the same, if inputs are recomputed or other updates move to the device


class Candidates:
    """The simulated choices of one search. `keeps` are the least and the most kept stages; with
    `resident` the search chooses the number of residents."""

    def __init__(self, problem: Problem, keeps: tuple[int, int], *, resident: bool) -> None:
        self.problem = problem
        self.keeps = keeps
        self.resident = resident
        self.times: dict[Choice, float] = {}  # seconds; the first of equals wins
        self._fastest: dict[Choice, Choice] = {}  # results of `_fastest_of`

    @property
    def best(self) -> Choice:
        """The fastest choice; the streamed one if nothing fits."""
        return min(self.times, key=self.times.__getitem__, default=Choice(0, self.problem.here))

    def count(self, choice: Choice) -> int:
        """Number of new residents."""
        return len(choice.places.resident - self.problem.here.resident)

    # Simulating choices.

    def add_everything(self) -> bool:
        """Simulate the choice that keeps all stages and has all buckets resident, if it fits."""
        count = len(self.problem.candidates) if self.resident else 0
        choice = self.problem.with_residents(count, keep=self.keeps[1])
        resident = choice.places.resident
        if len(resident) < len(self.problem.buckets):
            return False
        size = self.problem.resident_bytes(resident, gradients=False)  # a quick lower bound
        return size <= self.problem.budget_bytes and self._simulate(choice)

    def add_each(self, counts: Iterable[int], shares: Iterable[float]) -> None:
        """Try every combination of numbers of residents and shares of device updates."""
        for count in counts:
            choice = self.problem.with_residents(count)
            streams = len(choice.places) < len(self.problem.buckets)  # some stream from the host
            for share in sorted(shares) if streams else [0.0]:
                self.add(replace(choice, device_update=share))

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

    def _simulate(self, choice: Choice) -> bool:
        """Record a choice's time; False if it does not fit after all, because `Problem.fits` only
        estimates."""
        problem, enough_s = self.problem, min(self.times.values(), default=math.inf) * (1 + _EQUAL)
        if choice in self.times or problem.least_s(choice) > enough_s:  # by its computes alone
            return True
        if not problem.fits_host(choice) or problem.peak_bytes(choice) > problem.budget_bytes:
            return False
        step_s = problem.step_s(choice)
        # a choice that is too slow on the measured host is not simulated on the slower one
        self.times[choice] = step_s if step_s > enough_s else problem.expected_s(choice)
        return True

    def _time(self, choice: Choice) -> float:
        """Seconds of a simulated choice; infinite for others."""
        return self.times.get(choice, math.inf)

    def _fastest_of(self, choice: Choice) -> Choice:
        """Try a choice; returns the fastest of the choices that this simulates (the first of
        equals), or the same choice if none fits."""
        if choice not in self._fastest:
            before = set(self.times)
            self.add(choice)
            new = (choice for choice in self.times if choice not in before)
            self._fastest[choice] = min(new, key=self.times.__getitem__, default=choice)
        return self._fastest[choice]

    def climb(
        self, at: int, step: int, numbers: range, look: Callable[[int], Choice], least: int = 1
    ) -> Choice:
        """Climb from a number: try `step` below and above while that is faster, then halve the step
        until it is less than `least`. `look` returns the fastest choice with a number."""
        found = {at: look(at)}
        while step >= least:
            near = [at, *(n for n in (at - step, at + step) if n in numbers)]
            found |= {n: look(n) for n in near if n not in found}
            faster = min(near, key=lambda n: self._time(found[n]))
            if self._time(found[faster]) >= self._time(found[at]) * (1 - _EQUAL):
                step //= 2
            at = faster
        return found[at]

    # The moves.

    def add_late_states(self, streamed: Choice) -> None:
        """Try longer delays until states have left the device; if that does not fit, fetch them
        only one stage ahead, too. Start with the fewest residents (`streamed`) and with as many as
        the best choice has: states that stay longer take memory from residents, so fewer residents
        may allow a longer delay."""

        def look(count: int, delays: Iterable[int]) -> Choice:
            for delay in delays:
                late = replace(streamed, places=self.problem.places(count), state_delay=delay)
                if not self.add(late):
                    self.add(replace(late, state_lookahead=1))
            return self.best

        least, at = self.count(streamed), self.count(self.best)
        for count in dict.fromkeys((least, at)):
            look(count, _DELAYS)

        def later(count: int) -> Choice:
            delay = self.best.state_delay
            return look(count, (delay, 2 * delay))

        at = self.count(self.best)
        self.climb(at, (at - least) // 2, self._counts(self.best), later)

    def _counts(self, choice: Choice) -> range:
        """The numbers of new residents with which the other buckets fit elsewhere."""
        if not self.resident:
            return range(0)
        least = self.problem.fewest_residents(choice) or 0
        return range(least, len(self.problem.candidates) + 1)

    def add_offloaded(self, choice: Choice) -> None:
        """Simulate choices with inputs of stages on the host: with as few as necessary, and with
        more, which may leave memory to keep stages.

        If the host does not hold these inputs, every other stage is rerun instead of having its
        outputs wait, or the waiting tensors go on to a disk (`Tiers.settled`). The freed device
        memory is used for residents: either just enough for the others to fit elsewhere, or as many
        as fit, which leaves less work to a disk.
        """
        problem = self.problem
        for rerun in (False, True) if problem.may_rerun else (False,):
            waiting = replace(choice, rerun=rerun)
            few = problem.fewest_offloaded(waiting)
            some = () if few is None else (few, (few + problem.stages) // 2, problem.stages)
            for count in sorted(set(some)):
                waiting = replace(waiting, offload=count)
                if not self.resident:
                    self.add(waiting)
                    continue
                both = {problem.fewest_residents(waiting), problem.most_residents(waiting)}
                for residents in sorted(n for n in both if n is not None):
                    self.add(replace(waiting, places=problem.places(residents)))

    def surest(self) -> Choice:
        """The choice with the most residents among those as fast as the fastest."""
        enough_s = self.times[self.best] * (1 + _EQUAL)
        fast = [choice for choice, step_s in self.times.items() if step_s <= enough_s]
        return max(fast, key=lambda choice: (len(choice.places.resident), -self.times[choice]))

    def with_halves(self, best: Choice) -> Choice:
        """Keep half of some stages' saved tensors if it pays off: more stages fit, and the dropped
        half is cheap to recompute. Other numbers of residents are tried with it."""
        at, before = self.count(best), self.times[best]

        def look(count: int) -> Choice:
            places = self.problem.places(count)
            return self._fastest_of(replace(best, places=places, halves=True))

        if best.keep == self.problem.stages:
            return best  # nothing is recomputed
        found = look(at)
        if self._time(found) >= before * (1 - _EQUAL):
            return best
        found = self.climb(at, max(1, at // 4), self._counts(found), look)
        return found if self._time(found) < before * (1 - _PAYS) else best

    def with_memory_freed(self, best: Choice) -> Choice:
        """Free device memory that a fitting plan does not have to free, for more residents or kept
        stages, if that pays off: inputs of recomputed stages wait on the host or are recomputed."""
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
            if problem.may_rerun:
                run_again = replace(best, rerun=True, keep=0, device_update=0.0)
                ways += [run_again, replace(run_again, offload=problem.stages)]
        for way in ways:
            most = problem.most_residents(way) or 0
            if most > self.count(way):
                yield replace(way, places=problem.places(most))

    def with_saved_on_host(self, best: Choice) -> Choice:
        """Keep as many stages on the host as pays off. Half of the stages not yet kept are tried
        first, so that copied and recomputed stages alternate. If that does not fit, more are tried,
        because evenly spread they may hold less device memory while they are copied."""
        stages, before = self.problem.stages, self.times[best]
        count, most = (stages - best.keep) // 2, self.problem.most_on_host(best)
        counts = (count, most // 2, most, *(count >> k for k in range(1, count.bit_length())))

        def look(n: int) -> Choice:
            """The fastest choice with this number; gives up a few residents if necessary."""
            found = best
            for fewer in _FEWER[: self.count(best) + 1] if n else ():
                places = self.problem.places(self.count(best) - fewer)
                found = self._fastest_of(replace(best, places=places, saved_on_host=n))
                if found in self.times:
                    break
            return found

        first = next((n for n in counts if n and look(n) in self.times), 0)
        least = max(1, round(stages * _APART) // 2)
        found = self.climb(first, first // 2, range(1, stages - best.keep), look, least)
        return found if self._time(found) < before * (1 - _PAYS) else best
