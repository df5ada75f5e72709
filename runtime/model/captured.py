"""The callable that the backend returns to Dynamo for a captured graph: it runs the schedules.

A `CapturedGraph` accepts any parameters and shapes. For each kind of call it keeps a `Program`,
whose schedules are built at first use. If Dynamo captured sizes as symbols, one program serves all
their values (`megacompile.runtime.model.input_keys`), provided it can be traced with symbols.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat, garbage, log, notices, progress
from megacompile.errors import DeviceMemoryError, MegacompileError, UnsupportedGraphError
from megacompile.ir.capture import Ambient, Capture, GraphInput
from megacompile.runtime.model import input_keys
from megacompile.runtime.model.call import run
from megacompile.runtime.model.input_keys import LastCall, SymbolicInputs
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.program import MovesFirst, Program
from megacompile.runtime.params import shared_memory
from megacompile.runtime.params.eager_notice import share
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.step.step import Updates

_REFUSED = object()  # in a kind's keys: try no more programs with symbols
_NOT_WITH_SYMBOLS = (  # tracing with symbols may raise these where tracing with numbers succeeds
    UnsupportedGraphError,
    compat.UntraceableSymbols,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
)
_OTHER = (
    "each combination of inputs, and each branch that the model takes on sizes, gets its own code"
)
PROGRAMS = 256  # per captured graph; the least recently called are dropped
MOST_SKIPPED = 255  # calls between two tries


class Backoff:
    """Skips calls after failures: none at first, then every second one, three of four, ..."""

    def __init__(self) -> None:
        self.why_not = ""  # the last attempt failed
        self.failures = self.programs = 0  # consecutive ones; programs that they made
        self.skipped = self._wait = 0  # calls between two tries; until the next one

    def is_due(self) -> bool:
        """True if the call that begins should be tried."""
        self._wait -= 1
        return self._wait < 0

    def skip(self, calls: int) -> None:
        """Skip this many calls before the next try, and between later ones."""
        self.skipped = self._wait = min(MOST_SKIPPED, calls)

    def failed(self, why: str) -> None:
        """Record a failed attempt; the third begins to skip calls."""
        self.why_not = why
        self.failures += 1
        if self.failures >= 3:
            self.skip(2 * self.skipped + 1)

    def reset(self) -> None:
        """Record a success."""
        self.failures = self.skipped = self._wait = 0


class CapturedGraph:
    """One graph that Dynamo captured, as a callable of its inputs.

    A program is bound to the following properties. A call uses a program that matches in all of
    them:

    | a program is bound to | held by |
    |---|---|
    | parameters: bucket, index, do they train? | `_key`, also where their sizes are symbols |
    | how packed parameters are put together | `_key`: their `Wrapping` |
    | tensors: class, layout, dtype, device, do they require grad? | `_key` |
    | their shapes and strides | `_key`; for symbols `SymbolicInputs.fits`, `Program.serves` |
    | numbers | `_key`; for symbols their types, and `Program.serves` |
    | which inputs share memory, if one is changed in place | `_overlaps`; none with symbols |
    | grad mode, autocast, the default dtype, kernel settings | `Ambient` |
    | the layout of the buckets | `plans`: all programs are rebuilt |
    | the placement of the buckets | `Plans.version`: all programs are planned again |
    | outputs with a gradient, micro-batches, update | `Variant`, in the program |
    | the planned memory | `covers` |
    | the module, and everything Python read during capture | Dynamo's guards: another graph |

    """

    def __init__(
        self,
        name: str,  # for messages
        module: fx.GraphModule,
        buckets: ModelBuckets,
        updates: Updates,  # prepared when a plan is made
        begins_call: Callable[[], bool],  # true while this call of the model has done nothing yet
    ) -> None:
        self.name = name
        self.module = module
        self.buckets = buckets
        self.updates = updates
        self.begins_call = begins_call
        self.machine = buckets.machine
        self.plans = buckets.plans
        self.version = self.plans.version  # of the plans that the programs were made for
        self.most = PROGRAMS  # maximum number of programs
        self.has_evicted = False  # programs were dropped; their code may be freed
        self.programs: dict[Hashable, Program | None] = {}
        self.changed: frozenset[int] = frozenset()  # the inputs that a program changes in place
        self._key = functools.partial(input_keys.key_of, self.machine.place)
        self._input = functools.partial(input_keys.input_of, self.machine.place)
        self._called: dict[Hashable, None] = {}  # keys of programs, newest call last
        described = compat.described_inputs(module)
        self.symbolic = () if described is None else input_keys.symbolic_inputs(described)
        self._kinds: dict[Hashable, list[Hashable]] = {}  # keys of programs with symbols, by kind
        self.made = 0  # programs so far, including dropped ones
        self.why_made = _OTHER  # the newest one
        self._last: LastCall | None = None  # of a program without symbols
        self._last_key: Hashable = None
        self._attempts = Backoff()  # failed programs: sizes are rarely the reason

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.plans is not self.buckets.plans or self.version != self.plans.version:
            self._follow_plans()
        is_plain = input_keys.PLAIN.issuperset(map(type, args))
        given = whole = args if is_plain else input_keys.fetched(args)
        if self.symbolic:
            whole = self.symbolic[0].plain(whole)
        args = whole if is_plain else input_keys.taken_apart(whole)
        ambient = Ambient.current(self.machine.device)
        program = None
        for symbolic in self.symbolic:
            program = program or self._program_with_symbols(symbolic, ambient, args, whole)
        program = program or self._program(ambient, args, whole)
        if program is None:
            result: Sequence[Any] = self.module(*given)
            return result
        return run(program, args)

    def _follow_plans(self) -> None:
        if self.plans is not self.buckets.plans:  # the buckets have a new layout
            self.plans = self.buckets.plans
            self.programs.clear()
            self._called.clear()
            self._kinds.clear()
        else:  # a pending backward holds the old programs
            self.programs = {key: p and p.anew() for key, p in self.programs.items()}
        self.version = self.plans.version
        self._last = None

    def _program(
        self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]
    ) -> Program | None:
        """The program for a call; None if the call runs in eager mode. `args` are `whole` with
        packed parameters unpacked."""
        last = self._last if args is whole else None  # nothing is packed
        if last is not None and last.program.executors:
            if last.is_like(ambient, args, self.changed):
                return last.program
        key = self._call_key(ambient, args, whole)
        if key not in self.programs:
            if not self._attempts.is_due():
                return None
            program = self._build(ambient, args, whole)
            key = self._call_key(ambient, args, whole)  # the program knows which inputs are changed
            self._add(key, program)
        self._called.pop(key, None)
        self._called[key] = None
        program = self.programs[key]
        if program is not None and not program.executors:
            self._plan(program)
        if args is whole:  # a call that has occurred twice: its program is found at once next time
            again, self._last_key, self._last = key == self._last_key, key, None
            if again and program is not None:
                last = LastCall(program, ambient, args, self.changed)
                self._last = last if last.is_usable else None
        return program

    def _add(self, key: Hashable, program: Program | None) -> None:
        """Add a program; drops the least recently called ones if there are too many."""
        self.made += 1
        self.programs[key] = program
        self._called[key] = None
        while len(self.programs) > self.most:
            old = next(iter(self._called))
            self.programs.pop(old, None)
            del self._called[old]
            self.has_evicted = True

    def _program_with_symbols(
        self, symbolic: SymbolicInputs, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]
    ) -> Program | None:
        """The program with symbols for calls of this kind; None if no program serves this call."""
        values = symbolic.values(whole)
        if self._overlaps(args) or not symbolic.fits(whole, values):
            return None
        kind = (ambient, *symbolic.kind(self._key, whole))
        keys = self._kinds.setdefault(kind, [])
        broken = ""  # the assumption of the newest program that this call violates
        for key in keys:
            program = self.programs.get(key)
            if program is None:
                continue
            if not program.executors and program.holds(values):
                self._plan(program)
            if program.serves(values):
                self._called.pop(key, None)  # it is not there if Ctrl-C came between these lines
                self._called[key] = None
                if not input_keys.covers(program, values):
                    program = self._with_room(program, values, key)
                    self.has_evicted = True
                return program
            broken = broken or program.broken(values)
        if _REFUSED in keys:
            return None
        try:
            with self._building():
                program = self._divided(ambient, lambda: symbolic.inputs(self._input, whole))
                self.changed |= program.changed
                if self._overlaps(args):
                    return None
                program = self._with_room(program, values)
        except _NOT_WITH_SYMBOLS as error:
            ours = isinstance(error, MegacompileError)
            if isinstance(error, torch.OutOfMemoryError) or (
                ours and not isinstance(error, UnsupportedGraphError)
            ):
                raise
            what = "set of sizes" if symbolic is self.symbolic[-1] else "value of a float"
            self.why_made = log.own_code(self.name, log.without_symbols(error, what))
            keys.append(_REFUSED)
            return None
        self.why_made = _OTHER
        if broken:
            self.why_made = log.own_code(self.name, f"other sizes need their own code: {broken}")
        key = (kind, self.made)
        keys.insert(0, key)
        for old in keys[input_keys.PROGRAMS_AT_ONCE :]:
            if old is not _REFUSED:
                keys.remove(old)
                self.programs.pop(old, None)
                self._called.pop(old, None)
        self._add(key, program)
        return program

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Wraps slow work: tracing, planning and compiling a program."""
        show = self.machine.progress
        with progress.line("capturing the model", show), garbage.old_objects_left_out():
            yield

    def _with_room(
        self, program: Program, values: Sequence[int | float], key: Hashable = None
    ) -> Program:
        """The same program and code, planned for calls with these values and, if memory allows, for
        slightly larger ones. It replaces the one of a key before it is planned, because buckets may
        have to move first. Raises DeviceMemoryError if nothing fits."""
        failed: DeviceMemoryError | None = None
        for made in input_keys.with_room(program, values):
            if key is not None:
                self.programs[key] = made
            try:
                self._plan(made, again=True)
            except DeviceMemoryError as error:
                failed = error.with_traceback(None)  # whose frames hold the call's inputs
                continue
            if made.holds(values):
                return made
        if key is not None:
            self.programs[key] = program
        raise failed or UnsupportedGraphError("its code is not valid for its own sizes")

    def _call_key(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Hashable:
        return (ambient, self._overlaps(args), *map(self._key, whole))

    def _overlaps(self, args: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """The inputs that share memory with an input that is changed in place."""
        if not self.changed:
            return ()
        return shared_memory.overlaps(args, self.changed, self.machine.homes())

    def _build(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Program | None:
        try:
            with self._building():
                program = self._divided(ambient, lambda: tuple(map(self._input, whole)))
                self.changed |= program.changed
                if self._overlaps(args):
                    raise UnsupportedGraphError(
                        "inputs share memory, with a parameter or one another, and one is changed "
                        "in place; pass copies (.clone())"
                    )
                self._plan(program)
        except UnsupportedGraphError as error:
            params = [param for bucket in self.machine.buckets.values() for param in bucket.params]
            read = (id(a.param) for a in args if isinstance(a, StreamedParameter))
            notices.warn(
                f"megacompile: {self.name} is not scheduled and runs in eager mode, fetching "
                f"{share(params, read)} at each use, unless they are on the device (slower, same "
                f"numbers): {error}"
            )
            self._attempts.failed(str(error))
            garbage.take_old_objects_in()
            return None
        self._attempts.reset()
        return program

    def _plan(self, program: Program, *, again: bool = False) -> None:
        """Plan the schedule that will be needed, and lower it. With `again`, or if nothing fits
        otherwise, buckets may leave the device, even if a plan for smaller inputs put them there.

        Raises DeviceMemoryError if nothing fits, and MovesFirst if buckets have to move: the plan
        needs it, and the call has done nothing yet that would be repeated; or nothing fits at their
        current placement.
        """
        with self._building():
            self.machine.await_parameters()  # a plan counts free memory
            may_move = not self.machine.pending and self.begins_call()
            lacking: DeviceMemoryError | None = None
            variant = program.variant()
            try:
                wanted = program.choose(variant, again=again and may_move)
            except DeviceMemoryError as error:
                if again and may_move:
                    raise
                lacking = None if may_move else error.with_traceback(None)
                wanted = program.choose(variant, again=True)
            if program.tangents:
                self.updates.parts.precompile(wanted.places.resident)
            now = self.plans.placement
            may_move = may_move and self.machine.may_move(wanted.moving(now))
            if wanted != now and (may_move or lacking is not None):
                raise MovesFirst(lacking)
            planned = program.plan(variant)
            if program.tangents:
                self.updates.parts.preallocate(planned)
            program.executor(variant)
            garbage.take_old_objects_in()  # the call goes on

    def _divided(self, ambient: Ambient, kinds: Callable[[], tuple[GraphInput, ...]]) -> Program:
        """A program for calls with these inputs: partitioned into stages, not scheduled yet."""
        if transform := compat.transforms(self.module):
            raise UnsupportedGraphError(f"it uses torch.func ({transform})")
        if compat.has_while_loop(self.module):
            raise UnsupportedGraphError("it uses while_loop")
        capture = Capture(self.name, self.module, kinds(), self.machine.device, ambient)
        return Program(capture, self.plans, self.machine)
