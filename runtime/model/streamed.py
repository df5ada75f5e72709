"""A model whose parameters live in host buckets: what a call of it does.

1. Adopt what the user changed since the last call: replaced storages, new parameters, buffers.
2. Move inputs to the compute device.
3. Swap the proxies in, run the captured model, swap them out.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import ModelError
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.schedule import Schedule
from megacompile.options import Lowering, Options
from megacompile.progress import bar
from megacompile.runtime.device.slots import DeviceSlots
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.model import autograd, shortage
from megacompile.runtime.model.captured import CapturedGraph, Compiler
from megacompile.runtime.model.data_parallel import DataParallel, refuse_moves
from megacompile.runtime.model.weakly import weakly, while_it_lives
from megacompile.runtime.ops.head import bind_operators
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params import inputs
from megacompile.runtime.params.aliases import AliasNotice
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradients import Gradients
from megacompile.runtime.params.guards import guard_of, unguarded
from megacompile.runtime.params.proxies import Proxies, Source, StandIns, StreamedParameter
from megacompile.runtime.params.undo import Undos, hold, undone, use_unguarded
from megacompile.runtime.step.step import Updates
from megacompile.runtime.updates.in_backward import InBackward
from megacompile.runtime.updates.on_device import DeviceUpdates
from megacompile.text import printable
from megacompile.validate import check_model


class StreamedModel:
    """Stands behind a model's `__call__`; kept in `model._compiled_call_impl`.

    Args:
        model: changed in place: its parameters become views of host buckets.
        options: validated.
        divide: gives the units of a model (`megacompile.passes.stages.units`).
        compiler: gives a `Compiler` for units (`megacompile.api`).
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        divide: Callable[[nn.Module], tuple[Unit, ...]],
        compiler: Callable[[tuple[Unit, ...]], Compiler],
    ) -> None:
        self.model = model
        self.options = options
        self.divide = divide
        self.make_compiler = compiler
        if options.device.type == "cuda":
            compat.use_expandable_segments()  # a plan is about bytes, not about fragments
        compat.note_backward_calls()
        self.data_parallel = DataParallel(model, options)
        streams = Streams(options.device)
        self.machine = Machine(
            device=options.device,
            streams=streams,
            slots=DeviceSlots(options.device),
            buckets={},
            gradients=Gradients(streams, exact=options.lowering is Lowering.EAGER),
            place=self._place,
            device_update=DeviceUpdates(streams),
            detect_anomaly=options.detect_anomaly,
        )
        self.graphs: list[CapturedGraph] = []
        self.resident: frozenset[int] = frozenset()  # keys of the buckets on the device
        self.aliases = AliasNotice()
        self.aliases.of_parts(model)
        self._take_over()
        self.updates = Updates(self.machine, options, weakly(self._rest))
        if options.optimizer is not None:
            self.machine.in_backward = InBackward(options.optimizer, self.updates.prepare)
        frame = compat.frame_of(model, f"call_{type(model).__name__}")
        backend = weakly(self._capture)
        self._compiled = torch.compile(
            frame, backend=backend, options={"guard_filter_fn": _needed_guards}
        )
        end = weakref.finalize(self, compat.forget_compiled, frame.__code__, backend)
        end.atexit = False
        self.machine.before_step = while_it_lives(self._before_step)
        bind_operators()
        self._said = False  # that torch.compile is not needed?
        self._alone = threading.RLock()  # the swap and the slots serve one call at a time
        _LIVE.add(self)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if tracer := compat.tracer_around():
            self._refuse(tracer)
        return undone(functools.partial(self._undone, args, kwargs))

    def _refuse(self, tracer: str) -> None:
        raise ModelError(
            f"{type(self.model).__name__}: called within {tracer}, which needs ordinary "
            "parameters; use a plain model there: copy.deepcopy(model) is one"
        )

    def _undone(self, args: tuple[Any, ...], kwargs: dict[str, Any], undos: Undos) -> Any:
        hold(self._alone, undos)
        stand_ins = undone(functools.partial(self._adopt, undos))
        if compat.in_transform() and not compat.given_to_functional_call():
            self._refuse("torch.func")
        args, kwargs = inputs.moved(args, kwargs, self._to_device)
        before = shortage.Before.of(self.model, self.options.device)
        while True:
            try:
                return undone(functools.partial(self._run, stand_ins, args, kwargs))
            except torch.OutOfMemoryError as error:
                ran_out = shortage.first_line(error)  # not the error: its frames hold memory
            self._step_down(before, ran_out)

    def _run(
        self, stand_ins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any], undos: Undos
    ) -> Any:
        undos.append(functools.partial(compat.set_dynamo_options, compat.dynamo_options()))
        compat.set_dynamo_options(compat.CALL_OPTIONS)
        stand_ins.put_in(self._stand_in, undos)
        self.proxies.swap_in(undos)
        return self._compiled(*args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What takes a parameter's place in a call, where a functional call gives this tensor."""
        guard = guard_of(tensor)
        if guard is not None:  # a parameter of another model
            guard.open(tensor)
        proxy = self.proxies.of(tensor)
        result: torch.Tensor = self._to_device(tensor) if proxy is None else proxy
        return result

    def _is_in_a_call(self) -> bool:
        """Does the model call itself? Then its parameters are proxies rightly."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is StreamedModel._run.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _within_torch_compile(self) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"megacompile: {type(self.model).__name__} is called from code that torch.compile "
                "captures, which leaves it as it is: megacompile compiles it (said once); leave "
                "out torch.compile where it is around the model alone",
                stacklevel=4,
            )

    __call__ = compat.opaque(
        _call,
        reason="megacompile compiles this model itself; leave out fullgraph=True, or torch.compile",
        told=_within_torch_compile,
    )

    def _step_down(self, before: shortage.Before, ran_out: str) -> None:
        """After a forward that ran out of device memory: a plan that needs less, from the start."""
        before.restore(self.model, ran_out)
        shortage.step_down(self.compiler, self.machine.slots, ran_out, "the forward")
        for graph in self.graphs:
            graph.stale = True
        self._move_if_wanted()

    def schedules(self) -> list[Schedule]:
        """The newest schedule of every program that ran, in the order of capture."""
        return [
            list(program.executors.values())[-1].schedule
            for graph in self.current()
            for program in graph.programs.values()
            if program is not None
        ]

    def _forget(self) -> None:
        """Let the compiler forget what no program uses any more."""
        programs = [p for graph in self.graphs for p in graph.programs.values() if p is not None]
        made = [e.schedule for program in programs for e in program.executors.values()]
        self.compiler.keep({program.stages for program in programs}, set(made))

    def _rest(self, buckets: Sequence[Bucket]) -> Schedule:
        """A schedule whose update is that of these buckets."""
        return self.compiler.rest(buckets, self.resident)

    def current(self) -> list[CapturedGraph]:
        """The captured graphs whose programs are those that ran last."""
        return [graph for graph in self.graphs if not graph.stale] or self.graphs

    @torch.inference_mode(False)  # what is allocated here outlives the mode
    def _take_over(self) -> None:
        """Move parameters to host buckets, bucket by bucket, and buffers to the device."""
        units = self.divide(self.model)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        before = bool(self.machine.buckets)
        self.machine.buckets.clear()
        if self.options.resident is not None:
            self.resident = _first_that_fit(units, named, self.options)
        if not before:
            refuse_moves(self.model, self._goes_to(units, named))
        total = sum(unit.bucket.size_bytes for unit in units)
        with bar("moving parameters to the host", total, self.options.progress, unit="B") as step:
            for unit in units:
                params = [named[place.name] for place in unit.bucket.params]
                key = unit.bucket.key
                made = self._bucket(unit.bucket, params, key in self.resident)
                self.machine.buckets[key] = made
                step(unit.bucket.size_bytes)
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()  # where the parameters were
        self.machine.gradients.bind(self.machine.buckets)
        self.machine.slots.forget()
        self.compiler = self.make_compiler(units)
        self.compiler.resident = self.compiler.wanted = self.resident
        self._buckets_of = {
            id(param): (bucket.layout, i)
            for bucket in self.machine.buckets.values()
            for i, param in enumerate(bucket.params)
        }
        self._buffers_to_device()
        self._make_proxies()

    def _goes_to(
        self, units: Sequence[Unit], named: Mapping[str, nn.Parameter]
    ) -> Callable[[nn.Parameter], str]:
        """The type of device that each parameter will be on."""
        resident = {
            id(named[place.name])
            for unit in units
            if unit.bucket.key in self.resident
            for place in unit.bucket.params
        }
        return lambda param: self.options.device.type if id(param) in resident else "cpu"

    def _make_proxies(self) -> None:
        """Last of all: if they fit, everything else does, though an interrupt came in between."""
        self.data_parallel.forget()
        self.proxies = Proxies(self.model, self.options.device, self._source)

    def _before_step(self) -> None:
        replaced = (b.replaced() for b in self.machine.buckets.values())
        self.aliases(self.model, [param for pairs in replaced for param, _ in pairs])
        self._move_if_wanted()

    def _move_if_wanted(self) -> None:
        """Carry out what the plan says of resident buckets, unless a backward is to come."""
        if self.compiler.wanted == self.resident or self.machine.pending:
            return
        with self._alone:
            moving = self.compiler.wanted ^ self.resident
            params = [p for key in moving for p in self.machine.buckets[key].params]
            why = self.compiler.stays or self.data_parallel.holds(params)
            if why:
                self._stay(why)
            else:
                self.move(self.compiler.wanted)

    def _stay(self, why: str) -> None:
        """Leave the buckets where they are for good, whatever the plan says of them."""
        self.data_parallel.say(why)
        self.compiler.stays = why
        self.compiler.stay()
        for graph in self.graphs:
            graph.stale = True

    @torch.inference_mode(False)
    def move(self, resident: frozenset[int]) -> None:
        """Let these buckets live on the device, and all others on the host.

        Gradients move along; optimizer states when the next step finds them elsewhere.
        """
        self.machine.slots.forget()  # its memory is for buckets that come to the device
        for key in list(self.machine.buckets):
            undone(functools.partial(self._move_bucket, key, key in resident))
        self.machine.gradients.bind(self.machine.buckets)
        self._make_proxies()
        for graph in self.graphs:
            graph.stale = True
        self.compiler.resident = self.compiler.wanted = resident
        self.resident = resident  # until here an interrupt leaves a move that begins again

    def _move_bucket(self, key: int, resident: bool, undos: Undos) -> None:
        old = self.machine.buckets[key]
        if resident == (old.resident is not None):
            return
        old.pending.settle()
        old.pending.withdraw()
        undos.append(functools.partial(_show_again, [(p, p.grad) for p in old.params]))
        gradients = self.machine.gradients.take(key)
        self.machine.buckets[key] = self._bucket(old.layout, old.params, resident)
        self.machine.gradients.put(self.machine.buckets[key], gradients)

    def _bucket(self, layout: Bucket, params: Sequence[nn.Parameter], resident: bool) -> HostBucket:
        pin = self.options.device.type == "cuda" and not resident
        return HostBucket(
            layout,
            params,
            pin=pin,
            grad_dtype=self.options.grad_dtype,
            pin_masters=pin and self.options.updates_on_device,
            resident=self.options.device if resident else None,
        )

    def _let_go(self) -> None:
        """Drop what refers to the old buckets, so that each is freed while the next is filled."""
        self.proxies.forget()
        self.machine.gradients.bind({})

    def _source(self, param: nn.Parameter) -> Source:
        layout, i = self._buckets_of[id(param)]
        bucket = self.machine.buckets[layout.key]
        copy = bucket.streamed[i] if bucket.has_copy else None
        return Source(copy, bucket.pending.settle, functools.partial(bucket.copy.take_back, i))

    def _place(self, proxy: StreamedParameter) -> tuple[Bucket, int]:
        return self._buckets_of[id(proxy.param)]

    def owns(self, param: nn.Parameter) -> bool:
        """Does a parameter lie in a bucket of this model?"""
        return id(param) in self._buckets_of

    def let_go(self) -> None:
        """Give up parameters that were taken out of the model since its last call."""
        with self._alone, unguarded():
            for bucket in self.machine.buckets.values():
                bucket.pending.settle()
                bucket.pending.withdraw()
            check_model(self.model)
            self._let_go()
            self._take_over()

    def _adopt(self, of_call: Undos, undos: Undos) -> StandIns:
        """Take over what has changed; gives what stands in for parameters until the call ends."""
        use_unguarded(undos)
        with compat.outside_inference_mode(), compat.on_host():
            refuse_nested(self.model)
            stand_ins = StandIns()
            fits = self.proxies.fits(self.model)
            if not fits and not self._is_in_a_call():
                self.proxies.put_back()  # what a call that was broken off twice has left
                stand_ins = self.proxies.stand_ins(self.model)
                stand_ins.take_out(of_call)
                fits = self.proxies.fits(self.model)
            if not fits or any(bucket.replaced() for bucket in self.machine.buckets.values()):
                self._adopt_changes(fits)
            for bucket in self.machine.buckets.values():
                if not bucket.pending.busy():
                    bucket.pending.settle()
                bucket.refresh()
            self._buffers_to_device()
        self.compiler.stays = self.data_parallel.around() or self.compiler.stays
        self._move_if_wanted()
        return stand_ins

    def _adopt_changes(self, fits: bool) -> None:
        buckets = self.machine.buckets.values()
        for bucket in buckets:
            bucket.pending.settle()
            bucket.pending.withdraw()
        check_model(self.model)
        ours = {value.data_ptr() for bucket in buckets for value in bucket.values}
        self.aliases(self.model, [p for p in self.model.parameters() if p.data_ptr() not in ours])
        if not fits:
            refuse_shared(self.model)
        fits = fits and not self.machine.exchanged()
        if not fits or not all(bucket.adopt() for bucket in buckets):
            self._let_go()
            self._take_over()
        else:
            self._make_proxies()  # a parameter's memory may have been moved

    def _buffers_to_device(self) -> None:
        places = [
            (compat.buffers_of(module), name, buffer)
            for module in self.model.modules()
            for name, buffer in compat.buffers_of(module).items()
            if buffer is not None and buffer.device != self.options.device
        ]
        if not places:
            return
        stray = {id(buffer): buffer for _, _, buffer in places}  # one buffer, several places
        there = inputs.moved_together(list(stray.values()), lambda b: b.to(self.options.device))
        made = dict(zip(stray, there, strict=True))
        for holder, name, buffer in places:
            holder[name] = made[id(buffer)]

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self.options.compute_dtype
        if dtype is not None and value.dtype == torch.float32:
            value = value.to(dtype)
        return value.to(self.options.device) if value.device != self.options.device else value

    def _capture(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend: one more captured graph."""
        del examples
        name = printable(type(self.model).__name__)
        if self.graphs:
            name += f".{len(self.graphs)}"
        graph = CapturedGraph(
            name,
            module,
            lambda: self.compiler,
            self.machine,
            autograd.run,
            while_it_lives(self._forget),
        )
        self.graphs.append(graph)
        return weakly(graph.__call__)


def _first_that_fit(
    units: Sequence[Unit], named: Mapping[str, nn.Parameter], options: Options
) -> frozenset[int]:
    """The first buckets that fit, with gradients and states, into `options.resident` bytes."""
    assert options.resident is not None
    cost = OptimizerCost.of(options)
    chosen: list[int] = []
    left: float = options.resident
    for unit in units:
        places = enumerate(unit.bucket.params)
        trained = [i for i, place in places if named[place.name].requires_grad]
        left -= cost.resident_bytes(unit.bucket, trained)
        if left < 0:
            break
        chosen.append(unit.bucket.key)
    return frozenset(chosen)


def _show_again(gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """Set `p.grad` where an interrupt came before its bucket had moved."""
    for param, gradient in gradients:
        if param.grad is None and gradient is not None:
            param.grad = gradient.to(param.device)


def refuse_nested(model: nn.Module) -> None:
    """Raise if a module inside of the model is megacompiled too: a parameter has one owner.

    Raises:
        ModelError: with the name of that module.
    """
    for name, module in model.named_modules():
        if module is not model and isinstance(compat.compiled_call(module), StreamedModel):
            raise ModelError(
                f"{type(model).__name__}.{name} is megacompiled itself; megacompile only the "
                "outermost module that is called (a copy.deepcopy of the other is a plain module)"
            )


def refuse_shared(model: nn.Module) -> None:
    """Raise if another megacompiled model has a parameter of this one: it has one owner.

    Two would keep it in two buckets, and each would update it in `optimizer.step()`.

    Raises:
        ModelError: with the names of the parameter here and there.
    """
    if _owners(model):
        gc.collect()  # a model that nobody has any more lives until then
    for owner, name, param in _owners(model):
        there = [n for n, p in owner.model.named_parameters() if p is param]
        if not there:
            if owner.owns(param):  # it was taken out of it since
                owner.let_go()
            continue
        raise ModelError(
            f"megacompile(): parameter {type(model).__name__}.{name} is owned by another "
            f"megacompiled model ({type(owner.model).__name__}.{there[0]} there), and a parameter "
            "has one owner; megacompile neither of them, but one module that has both and calls "
            "them; or give one of them a copy of the parameter"
        )


def _owners(model: nn.Module) -> list[tuple[StreamedModel, str, nn.Parameter]]:
    """Other megacompiled models with parameters of this one."""
    return [
        (other, name, param)
        for other in tuple(_LIVE)
        if other.model is not model
        for name, param in model.named_parameters()
        if other.owns(param)
    ]


_LIVE: weakref.WeakSet[StreamedModel] = weakref.WeakSet()


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Dynamo's guards but for those that take a proxy apart, which is the same in every call.

    They are Python functions, two for each parameter, and take half of the time of all guards. What
    a signal handler raises in a guard is lost, and the model is captured anew.
    """
    compat.forget_missing()  # the guards were evaluated for this filter
    return [
        not (
            (
                guard.guard_type == compat.SUBCLASS_GUARD
                and isinstance(guard.value, StreamedParameter)
            )
            or guard.name.endswith(compat.INNER_NAMES)
            and guard.value == ["host"]
        )
        for guard in guards
    ]
