"""The callable that the backend returns to Dynamo for a captured graph: it runs the schedules.

A `CapturedGraph` accepts any parameters and shapes. For each kind of call it keeps a `Program`,
whose schedules are built at first use. If Dynamo captured sizes as symbols, one program serves all
their values (`megacompile.runtime.model.symbolic`), provided it can be traced with symbols.
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
from megacompile.garbage import old_objects_left_out
from megacompile.ir.capture import (
    Ambient,
    Capture,
    GraphInput,
    Overlap,
)
from megacompile.progress import later_line
from megacompile.runtime.model.attempts import Attempts
from megacompile.runtime.model.call import run
from megacompile.runtime.model.input_keys import LastCall, fetched, input_of, key_of, taken_apart
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.plans import MovesFirst
from megacompile.runtime.model.program import Program
from megacompile.runtime.model.symbolic import (
    PROGRAMS_AT_ONCE,
    SymbolicInputs,
    covers,
    symbolic_inputs,
    with_room,
)
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
SHAPES_AT_ONCE = 8  # inference shapes that are scheduled at their first call
SHAPES_MET = 4096  # inference shapes remembered as seen once
PROGRAMS = 256  # per captured graph; the least recently called are dropped


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

    Args:
        name: for messages.
        module: the graph module that Dynamo captured.
        buckets: of the model.
        updates: the model's optimizer steps, prepared when a plan is made.
        begins_call: returns True while this call of the model has done nothing yet.
    """

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        buckets: ModelBuckets,
        updates: Updates,
        begins_call: Callable[[], bool],
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
        self._key = functools.partial(key_of, self.machine.place)
        self._input = functools.partial(input_of, self.machine.place)
        self._met: set[Hashable] = set()
        self._called: dict[Hashable, None] = {}  # keys of programs, newest call last
        described = compat.described_inputs(module)
        self.symbolic = () if described is None else symbolic_inputs(described)
        self._kinds: dict[Hashable, list[Hashable]] = {}  # keys of programs with symbols, by kind
        self._built = 0  # programs with symbols
        self.made = 0  # programs so far, including dropped ones
        self.why_made = _OTHER  # the newest one
        self._last: LastCall | None = None  # of a program without symbols
        self._last_key: Hashable = None
        self._attempts = Attempts()  # failed programs: sizes are rarely the reason

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.is_stale:
            self._follow_plans()
        given = whole = fetched(args)
        if self.symbolic:
            whole = self.symbolic[0].plain(whole)
        args = taken_apart(whole)
        ambient = Ambient.current(self.machine.device)
        program = None
        for symbolic in self.symbolic:
            program = program or self._program_with_symbols(symbolic, ambient, args, whole)
        program = program or self._program(ambient, args, whole)
        garbage.take_old_objects_in()
        if program is None:
            result: Sequence[Any] = self.module(*given)
            return result
        if program.capture.overlaps:
            args = (*args, *shared_memory.bases(args, program.capture.overlaps))
        return run(program, args)

    @property
    def is_stale(self) -> bool:
        """True if its programs will be planned again."""
        plans = self.buckets.plans
        return self.plans is not plans or self.version != plans.version

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
        """The program for a call; None if the call runs in eager mode.

        Args:
            args: inputs of the schedule.
            whole: inputs of the captured graph, with packed parameters not unpacked.
        """
        last = self._last if args is whole else None  # nothing is packed
        if last is not None and last.program.executors:
            if last.is_like(ambient, args, self.changed):
                return last.program
        key = self._call_key(ambient, args, whole)
        if key not in self.programs and self._worth_a_program(ambient, key):
            if not self._attempts.is_due():
                return None
            with self._building():
                program = self._build(ambient, args, whole)
            self.made += 1
            key = self._call_key(ambient, args, whole)  # the program knows which inputs are changed
            self.programs[key] = program
            self._evict()
        if key in self.programs:
            self._note_call(key)
        program = self.programs.get(key)
        if program is not None and not program.executors:
            self._plan_again(program)
        if args is whole:
            self._note_last(key, program, ambient, args)
        return program

    def _note_last(
        self, key: Hashable, program: Program | None, ambient: Ambient, args: Sequence[Any]
    ) -> None:
        """Remember a call that has occurred twice, so that its program is found at once next
        time."""
        again, self._last_key = key == self._last_key, key
        self._last = None
        if again and program is not None and not program.capture.overlaps:
            last = LastCall(program, ambient, args, self.changed)
            self._last = last if last.is_usable else None

    def _note_call(self, key: Hashable) -> None:
        self._called.pop(key, None)
        self._called[key] = None

    def _program_with_symbols(
        self,
        symbolic: SymbolicInputs,
        ambient: Ambient,
        args: Sequence[Any],
        whole: Sequence[Any],
    ) -> Program | None:
        """The program with symbols for calls of this kind; None if no program serves this call."""
        values = symbolic.values(whole)
        if self._overlaps(args) or not symbolic.fits(whole, values):
            return None
        kind = (ambient, *symbolic.kind(self._key, whole))
        keys = self._kinds.setdefault(kind, [])
        broken = ""
        for key in keys:
            program = self.programs.get(key)
            if program is None:
                continue
            if not program.executors and program.holds(values):
                self._plan_again(program)
            if not program.serves(values):
                broken = broken or program.broken(values)
            else:
                self._note_call(key)
                if not covers(program, values):
                    program = self._larger(key, program, values)
                return program
        if _REFUSED in keys:
            return None
        with self._building():
            return self._build_with_symbols(symbolic, ambient, args, whole, values, kind, broken)

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Wraps slow work: tracing, planning and compiling a program."""
        with later_line("capturing the model", self.machine.progress), old_objects_left_out():
            yield

    def _larger(self, key: Hashable, program: Program, values: Sequence[int | float]) -> Program:
        """The same program and code, planned for a call that needs more memory.

        Raises:
            DeviceMemoryError: nothing fits.
        """
        put = functools.partial(self.programs.__setitem__, key)
        with self._building():
            try:
                made = self._with_room(program, values, put)
            except DeviceMemoryError:
                put(program)
                raise
        self.has_evicted = True
        return made

    def _with_room(
        self,
        program: Program,
        values: Sequence[int | float],
        put: Callable[[Program], None] = lambda program: None,
    ) -> Program:
        """The program, planned for calls with these values and, if memory allows, for slightly
        larger ones.

        Args:
            put: called with the program before it is planned, because buckets may have to move
                first.
        """
        failed: DeviceMemoryError | None = None
        for made in with_room(program, values):
            put(made)
            try:
                self._plan(made, again=True)
            except DeviceMemoryError as error:
                failed = error.with_traceback(None)  # whose frames hold the call's inputs
                continue
            if made.holds(values):
                return made
        raise failed or UnsupportedGraphError("its code is not valid for its own sizes")

    def _build_with_symbols(
        self,
        symbolic: SymbolicInputs,
        ambient: Ambient,
        args: Sequence[Any],
        whole: Sequence[Any],
        values: Sequence[int | float],
        kind: Hashable,
        broken: str,
    ) -> Program | None:
        """A new program.

        Args:
            values: the symbols' values in this call.
            broken: the assumption of the newest program that this call violates.
        """
        keys = self._kinds[kind]
        try:
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
            self.why_made = log.without_symbols(self.name, error, what)
            keys.append(_REFUSED)
            return None
        self._built += 1
        self.made += 1
        fixed = log.fixed_sizes(self.name, program.fixed())
        self.why_made = fixed or log.other_way(self.name, broken) or _OTHER
        key = (kind, self._built)
        keys.insert(0, key)
        self.programs[key] = program
        for old in keys[PROGRAMS_AT_ONCE:]:
            if old is not _REFUSED:
                keys.remove(old)
                self.programs.pop(old, None)
                self._called.pop(old, None)
        self._note_call(key)
        self._evict()
        return program

    def _evict(self) -> None:
        """Drops the least recently called programs if there are too many."""
        if len(self.programs) <= self.most:
            return
        for key in list(self._called)[: len(self.programs) - self.most]:
            del self._called[key]
            self.programs.pop(key, None)
        self.has_evicted = True

    def _call_key(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Hashable:
        return (ambient, self._overlaps(args), *map(self._key, whole))

    def _overlaps(self, args: Sequence[Any]) -> tuple[Overlap, ...]:
        """The inputs that share memory with an input that is changed in place."""
        if not self.changed:
            return ()
        parameters = [b.values[0] for b in self.machine.buckets.values() if b.values]
        return shared_memory.overlaps(args, self.changed, parameters)

    def _worth_a_program(self, ambient: Ambient, key: Hashable) -> bool:
        """False if this inference runs in eager mode: with many new shapes (generation), until a
        shape recurs."""
        if ambient.grad_enabled or len(self.programs) < SHAPES_AT_ONCE or key in self._met:
            return True
        if len(self._met) >= SHAPES_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def _build(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Program | None:
        def kinds() -> tuple[GraphInput, ...]:
            return tuple(map(self._input, whole))

        try:
            program = self._divided(ambient, kinds, self._overlaps(args))
            if not program.changed <= self.changed:
                self.changed |= program.changed
                overlaps = self._overlaps(args)
                if overlaps != program.capture.overlaps:
                    program = self._divided(ambient, kinds, overlaps)
            self._plan(program)
        except UnsupportedGraphError as error:
            notices.warn(
                f"megacompile: {self.name} is not scheduled and runs in eager mode, fetching "
                f"{self._share(args)} at each use, unless they are on the device (slower, same "
                f"numbers): {error}"
            )
            self._attempts.failed(str(error))
            return None
        self._attempts.traced()
        return program

    def _plan_again(self, program: Program) -> None:
        """Plan the schedules of a program again after its buckets have moved."""
        with self._building():
            self._plan(program)

    def _plan(self, program: Program, *, again: bool = False) -> None:
        """Plan the schedule that will be needed, and lower it.

        Args:
            again: buckets may leave the device, even if a plan for smaller inputs put them there.
                If nothing fits otherwise, they may leave it in any case.

        Raises:
            MovesFirst: the plan needs buckets to move, and the call has done nothing yet that would
                be repeated; or nothing fits at their current placement.
            DeviceMemoryError: nothing fits.
        """
        if self.machine.coming():
            progress.now("moving parameters to the host")
            self.machine.await_parameters()  # a plan counts free memory
        may_move = not self.machine.pending and self.begins_call()
        lacking: DeviceMemoryError | None = None
        try:
            wanted = program.choose(program.variant(), again=again and may_move)
        except DeviceMemoryError as error:
            if again and may_move:
                raise
            lacking = None if may_move else error.with_traceback(None)
            wanted = program.choose(program.variant(), again=True)
        if program.tangents:
            self.updates.ahead.precompile(wanted.places.resident)
        now = self.plans.placement
        if wanted != now and lacking is not None:
            raise MovesFirst(lacking)
        if wanted != now and may_move and self.machine.may_move(wanted.moving(now)):
            raise MovesFirst
        planned = program.plan(program.variant())
        if program.tangents:
            self.updates.ahead.preallocate(planned)
        program.executor(program.variant())

    def _share(self, args: Sequence[Any]) -> str:
        """The part of the model that the graph reads."""
        params = [param for bucket in self.machine.buckets.values() for param in bucket.params]
        return share(params, (id(a.param) for a in args if isinstance(a, StreamedParameter)))

    def _divided(
        self,
        ambient: Ambient,
        kinds: Callable[[], tuple[GraphInput, ...]],
        overlaps: tuple[Overlap, ...] = (),
    ) -> Program:
        """A program for calls with these inputs: partitioned into stages, not scheduled yet."""
        if transform := compat.transforms(self.module):
            raise UnsupportedGraphError(f"it uses torch.func ({transform})")
        if compat.has_while_loop(self.module):
            raise UnsupportedGraphError("it uses while_loop")
        capture = Capture(self.name, self.module, kinds(), self.machine.device, ambient, overlaps)
        return Program(capture, self.plans, self.machine)
