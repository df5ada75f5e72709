"""The callable that Dynamo gets back for a captured graph: it runs the graph's schedules.

A `CapturedGraph` is called with whatever parameters and shapes come; for each kind of call it
keeps a `Program`: the schedules for it, built at first use. Where Dynamo captured sizes as symbols,
one program serves all their values (`megacompile.runtime.model.symbolic`), if it can be traced so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat, log, notices, progress
from megacompile.errors import DeviceMemoryError, MegacompileError, UnsupportedGraphError
from megacompile.garbage import old_objects_left_out
from megacompile.ir.capture import (
    Ambient,
    Capture,
    ConstantInput,
    GraphInput,
    Overlap,
    PackedInput,
    ParamInput,
    TensorInput,
)
from megacompile.ir.keys import constant_key
from megacompile.ir.tensors import TensorMeta, kind_of
from megacompile.packed import is_wrapper, taken_apart
from megacompile.progress import later_line
from megacompile.runtime.model.attempts import Attempts
from megacompile.runtime.model.last_call import LastCall
from megacompile.runtime.model.plans import MovesFirst, Plans
from megacompile.runtime.model.program import Program
from megacompile.runtime.model.symbolic import (
    PROGRAMS_AT_ONCE,
    SymbolicInputs,
    covers,
    symbolic_inputs,
    with_room,
)
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params import shared_memory
from megacompile.runtime.params.eager_notice import share
from megacompile.runtime.params.proxies import StreamedParameter


def _is_packed(arg: Any) -> bool:
    """True if an argument stands in for a packed parameter: a wrapper over proxies."""
    if not is_wrapper(arg):
        return False
    return all(isinstance(part, StreamedParameter) for part in taken_apart(arg)[1])


def _taken_apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with what packed parameters are made of in their places."""
    if _PLAIN.issuperset(map(type, args)):
        return args
    parts = [taken_apart(arg)[1] if _is_packed(arg) else [arg] for arg in args]
    return tuple(part for each in parts for part in each)


_PLAIN = frozenset((StreamedParameter, torch.Tensor, torch.nn.Parameter, int, float, bool))


def _fetched(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Views of parameters that eager code made, on the device; anything else as it is."""
    views = [isinstance(arg, StreamedParameter) and arg.is_view for arg in args]
    if True not in views:
        return args
    return tuple(arg.clone() if view else arg for arg, view in zip(args, views, strict=True))


_REFUSED = object()  # among a kind's keys: no more programs with symbols are tried


_NOT_WITH_SYMBOLS = (  # what tracing with symbols may raise where tracing with numbers does not
    UnsupportedGraphError,
    compat.UntraceableSymbols,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
)


_OTHER = "each kind of inputs, and each way that the model's code takes for sizes, has its own code"


SHAPES_AT_ONCE = 8  # inference shapes that are scheduled when they first come


SHAPES_MET = 4096  # inference shapes that are known to have come once


PROGRAMS = 256  # of a captured graph; those that were called longest ago go


class CapturedGraph:
    """One graph that Dynamo captured, as a callable of its inputs.

    A program is bound to what follows. A call gets one for which all of it is the same:

    | a program is bound to | held by |
    |---|---|
    | parameters: bucket, index, do they train? | `_key`, also where their sizes are symbols |
    | how packed parameters are put together | `_key`: their `Wrapping` |
    | tensors: class, layout, dtype, device, do they require grad? | `_key` |
    | their shapes and strides | `_key`; of symbols `SymbolicInputs.fits`, `Program.serves` |
    | numbers | `_key`; of symbols their types, and `Program.serves` |
    | which inputs share memory, where one is changed in place | `_overlaps`; none with symbols |
    | grad mode, autocast, the default dtype, what chooses kernels | `Ambient` |
    | how the buckets are laid out | `plans`: all programs are made again |
    | where the buckets are | `stale`: all programs are planned again |
    | the outputs that get a gradient, micro-batches, an update | `Variant`, in the program |
    | the memory that is planned | `covers` |
    | the module, and all that Python asked while it was captured | Dynamo's guards: another graph |
    """

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        plans: Callable[[], Plans],
        machine: Machine,
        run: Callable[[Program, Sequence[Any]], Sequence[Any]],
        evicted: Callable[[], None] = lambda: None,
        *,
        begins_call: Callable[[], bool] = lambda: False,
        runs: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.module = module
        self.current_plans = plans
        self.plans = plans()
        self.machine = machine
        self.run = run
        self.evicted = evicted  # called when programs were given up
        self.begins_call = begins_call  # was nothing done yet in this call of the model?
        self.runs = runs  # called before it runs
        self.most = PROGRAMS  # that are kept
        self.programs: dict[Hashable, Program | None] = {}
        self.stale = False  # are they to be planned again, because buckets have moved?
        self.changed: frozenset[int] = frozenset()  # the inputs that a program changes in place
        self._met: set[Hashable] = set()
        self._called: dict[Hashable, None] = {}  # keys of the programs, the last one called last
        described = compat.described_inputs(module)
        self.symbolic = () if described is None else symbolic_inputs(described)
        self._kinds: dict[Hashable, list[Hashable]] = {}  # keys of programs with symbols, by kind
        self._built = 0  # programs with symbols
        self.made = 0  # programs, with those that were given up
        self.why_made = _OTHER  # the newest one
        self._last: LastCall | None = None  # of a program without symbols
        self._last_key: Hashable = None
        self._attempts = Attempts()  # to make a program: sizes are seldom why there is none

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.current_plans() is not self.plans:  # buckets were laid out again
            self.plans = self.current_plans()
            self.programs.clear()
            self._called.clear()
            self._kinds.clear()
            self._last = None
        elif self.stale:  # a backward that is to come has the old programs
            self.programs = {key: p and p.anew() for key, p in self.programs.items()}
            self._last = None
        self.stale = False
        given = whole = _fetched(args)
        if self.symbolic:
            whole = self.symbolic[0].plain(whole)
        args = _taken_apart(whole)
        ambient = Ambient.current(self.machine.device)
        program = None
        for symbolic in self.symbolic:
            program = program or self._program_with_symbols(symbolic, ambient, args, whole)
        program = program or self._program(ambient, args, whole)
        self.runs()
        if program is None:
            result: Sequence[Any] = self.module(*given)
            return result
        if program.capture.overlaps:
            args = (*args, *shared_memory.bases(args, program.capture.overlaps))
        return self.run(program, args)

    def _program(
        self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]
    ) -> Program | None:
        """The program for a call; None where it runs in eager mode.

        Args:
            args: what goes into a schedule.
            whole: what goes into the captured graph: packed parameters are not taken apart.
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
            key = self._call_key(ambient, args, whole)  # now it is known which inputs are changed
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
        """Remember a call that has come twice, to find its program at once when it comes again."""
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
        """The program for all calls of this kind; None where there is none for this call."""
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
        """Around what takes seconds: tracing, planning, and compiling a program."""
        with later_line("capturing the model", self.machine.progress), old_objects_left_out():
            yield

    def _larger(self, key: Hashable, program: Program, values: Sequence[int | float]) -> Program:
        """The program, planned for a call that needs more memory. It has the same code.

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
        self.evicted()
        return made

    def _with_room(
        self,
        program: Program,
        values: Sequence[int | float],
        put: Callable[[Program], None] = lambda program: None,
    ) -> Program:
        """The program, planned for calls with these values, and for somewhat larger ones if that
        fits.

        Args:
            put: is given it before its plan, for which buckets may move first.
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
        raise failed or UnsupportedGraphError("its code is not right for its own sizes")

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
            values: of the symbols in this call.
            broken: what of the newest one does not hold for it.
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
        """Removes the programs that were called longest ago, where there are too many."""
        if len(self.programs) <= self.most:
            return
        for key in list(self._called)[: len(self.programs) - self.most]:
            del self._called[key]
            self.programs.pop(key, None)
        self.evicted()

    def _call_key(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Hashable:
        return (ambient, self._overlaps(args), *map(self._key, whole))

    def _overlaps(self, args: Sequence[Any]) -> tuple[Overlap, ...]:
        """The inputs that share memory with an input that is changed in place."""
        if not self.changed:
            return ()
        parameters = [b.values[0] for b in self.machine.buckets.values() if b.values]
        return shared_memory.overlaps(args, self.changed, parameters)

    def _worth_a_program(self, ambient: Ambient, key: Hashable) -> bool:
        """Inference on ever new shapes (generation) runs in eager mode until a shape recurs."""
        if ambient.grad_enabled or len(self.programs) < SHAPES_AT_ONCE or key in self._met:
            return True
        if len(self._met) >= SHAPES_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def _key(self, arg: Any, any_size: bool = False) -> Hashable:
        """The key of an input: calls whose inputs have equal ones may share a program.

        Args:
            arg: an input of the captured graph.
            any_size: its sizes are symbols. A parameter is bound to its place whatever they are.
        """
        if isinstance(arg, StreamedParameter):
            bucket, index = self.machine.place(arg)
            return (bucket.key, index, arg.param is not None and arg.param.requires_grad)
        if _is_packed(arg):
            wrapping, parts = taken_apart(arg)
            return (wrapping, *map(self._key, parts))
        if isinstance(arg, torch.Tensor):
            return (type(arg), arg.layout, kind_of(arg) if any_size else TensorMeta.of(arg))
        if isinstance(arg, (int, float)):
            return constant_key(arg)
        return (type(arg), arg)

    def _input(self, arg: Any) -> GraphInput:
        if isinstance(arg, StreamedParameter):
            return self._param_input(arg)
        if _is_packed(arg):
            wrapping, parts = taken_apart(arg)
            return PackedInput(wrapping, tuple(self._param_input(part) for part in parts))
        if type(arg) in compat.PLAIN_TENSORS:
            if arg.layout is not torch.strided:
                raise UnsupportedGraphError(f"an input has layout {arg.layout}")
            return TensorInput(TensorMeta.of(arg))
        if isinstance(arg, (int, float, bool)):
            return ConstantInput(arg)
        raise UnsupportedGraphError(f"an input is a {type(arg).__name__}")

    def _param_input(self, proxy: torch.Tensor) -> ParamInput:
        assert isinstance(proxy, StreamedParameter)
        return ParamInput(*self.machine.place(proxy), proxy.requires_grad)

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
                f"{self._share(args)} at each use, unless they live on the device (slower, same "
                f"numbers): {error}"
            )
            self._attempts.failed(str(error))
            return None
        self._attempts.traced()
        return program

    def _plan_again(self, program: Program) -> None:
        """Plan the schedules of a program whose buckets have moved since."""
        with self._building():
            self._plan(program)

    def _plan(self, program: Program, *, again: bool = False) -> None:
        """Plan the schedule that will be needed, and give it code.

        Args:
            again: buckets may leave the device, where a plan for smaller inputs has put them. Where
                nothing fits otherwise, they may in any case.

        Raises:
            MovesFirst: it is for buckets that are elsewhere, and nothing has been done yet that
                would be done twice; or nothing fits where they are.
            DeviceMemoryError: nothing fits.
        """
        if self.machine.coming():
            progress.now("moving parameters to the host")
            self.machine.await_parameters()  # a plan is about the memory that is free
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
            self.machine.precompile_updates(wanted.resident)
        now = self.plans.placement
        if wanted != now and lacking is not None:
            raise MovesFirst(lacking)
        if wanted != now and may_move and self.machine.may_move(wanted.moving(now)):
            raise MovesFirst
        planned = program.plan(program.variant())
        if program.tangents:
            self.machine.preallocate(planned)
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
        """A program for calls with these inputs, with stages and no schedule yet."""
        if transform := compat.transforms(self.module):
            raise UnsupportedGraphError(f"it uses torch.func ({transform})")
        if compat.has_while_loop(self.module):
            raise UnsupportedGraphError("it uses while_loop")
        capture = Capture(self.name, self.module, kinds(), self.machine.device, ambient, overlaps)
        return Program(capture, self.plans, self.machine)
