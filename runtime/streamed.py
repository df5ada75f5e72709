"""A model whose parameters live in host buckets: what a call of it does.

1. Adopt what the user changed since the last call: replaced storages, new parameters, buffers.
2. Move inputs to the compute device.
3. Swap the proxies in, run the captured model, swap them out.
"""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.ir import Bucket, Schedule, Unit
from megacompile.optimizer_cost import OptimizerCost
from megacompile.options import Lowering, Options
from megacompile.runtime import autograd, shortage
from megacompile.runtime.captured import CapturedGraph, Compiler
from megacompile.runtime.data_parallel import DataParallel, refuse_moves
from megacompile.runtime.gradients import Gradients
from megacompile.runtime.guards import unguarded
from megacompile.runtime.handed import HandOver
from megacompile.runtime.host import HostBucket
from megacompile.runtime.in_backward import InBackward
from megacompile.runtime.machine import Machine
from megacompile.runtime.progress import bar
from megacompile.runtime.proxies import Proxies, Source, StreamedParameter
from megacompile.runtime.slots import DeviceSlots
from megacompile.runtime.step import Updates
from megacompile.runtime.streams import Streams
from megacompile.validate import check_model


class StreamedModel:
    """Stands behind a model's `__call__`; kept in `model._compiled_call_impl`.

    Args:
        model: changed in place: its parameters become views of host buckets.
        options: validated.
        divide: gives the units of a model (`megacompile.passes.units`).
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
            hand_over=HandOver(streams),
            detect_anomaly=options.detect_anomaly,
        )
        self.graphs: list[CapturedGraph] = []
        self.resident: frozenset[int] = frozenset()  # keys of the buckets on the device
        self._take_over()
        self.updates = Updates(self.machine, options)
        if options.optimizer is not None:
            self.machine.in_backward = InBackward(options.optimizer, self.updates.prepare)
        self._compiled = torch.compile(_frame_of(model), backend=_weakly(self._capture))
        self.machine.before_step = _while_it_lives(self._move_if_wanted)
        self._alone = threading.RLock()  # the swap and the slots serve one call at a time
        _LIVE.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._alone:
            with unguarded():
                self._adopt()
                self.compiler.stays = self.data_parallel.around() or self.compiler.stays
                self._move_if_wanted()
            args, kwargs = compat.tree_map(self._to_device, (args, kwargs))
            before = shortage.Before.of(self.model, self.options.device)
            while True:
                try:
                    with self.proxies.swapped_in(), compat.guards_on_hooks():
                        return self._compiled(*args, **kwargs)
                except torch.OutOfMemoryError as error:
                    ran_out = shortage.first_line(error)  # not the error: its frames hold memory
                self._step_down(before, ran_out)

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
        self._make_proxies()
        self._buffers_to_device()

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
        self.data_parallel.forget()
        self.proxies = Proxies(self.model, self.options.device, self._source)

    def _move_if_wanted(self) -> None:
        """Carry out what the plan says of resident buckets, unless a backward is to come."""
        with self._alone:
            if self.compiler.wanted != self.resident and not self.machine.pending:
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
        for key, old in list(self.machine.buckets.items()):
            if (key in resident) == (old.resident is not None):
                continue
            old.settle()
            old.withdraw()
            gradients = self.machine.gradients.take(key)
            self.machine.buckets[key] = self._bucket(old.layout, old.params, key in resident)
            del old
            self.machine.gradients.put(self.machine.buckets[key], gradients)
        self.resident = self.compiler.resident = self.compiler.wanted = resident
        self.machine.gradients.bind(self.machine.buckets)
        self._make_proxies()
        for graph in self.graphs:
            graph.stale = True

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
        self.machine.gradients.bind({})
        self.proxies.sites.clear()

    def _source(self, param: nn.Parameter) -> Source:
        layout, i = self._buckets_of[id(param)]
        bucket = self.machine.buckets[layout.key]
        copy = bucket.streamed[i] if bucket.has_copy else None
        return Source(copy, bucket.settle, functools.partial(bucket.take_back, i))

    def _place(self, proxy: StreamedParameter) -> tuple[Bucket, int]:
        return self._buckets_of[id(proxy.param)]

    def owns(self, param: nn.Parameter) -> bool:
        """Does a parameter lie in a bucket of this model?"""
        return id(param) in self._buckets_of

    def let_go(self) -> None:
        """Give up parameters that were taken out of the model since its last call."""
        with self._alone, unguarded():
            for bucket in self.machine.buckets.values():
                bucket.settle()
                bucket.withdraw()
            check_model(self.model)
            self._let_go()
            self._take_over()

    @torch.inference_mode(False)
    def _adopt(self) -> None:
        refuse_nested(self.model)
        buckets = self.machine.buckets.values()
        fits = self.proxies.fits(self.model)
        if not fits or any(bucket.replaced() for bucket in buckets):
            for bucket in buckets:
                bucket.settle()
                bucket.withdraw()
            check_model(self.model)
            if not fits:
                refuse_shared(self.model)
            fits = fits and not self.machine.exchanged()
            if not fits or not all(bucket.adopt() for bucket in buckets):
                self._let_go()
                self._take_over()
        for bucket in self.machine.buckets.values():
            if not bucket.busy():
                bucket.settle()
            bucket.refresh()
        self._buffers_to_device()

    def _buffers_to_device(self) -> None:
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # one buffer, several places
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.options.device:
                    if id(buffer) not in moved:
                        moved[id(buffer)] = (buffer, buffer.to(self.options.device))
                    module._buffers[name] = moved[id(buffer)][1]

    def _to_device(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.options.compute_dtype
        if dtype is not None and value.dtype == torch.float32:
            value = value.to(dtype)
        return value.to(self.options.device) if value.device != self.options.device else value

    def _capture(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend: one more captured graph."""
        del examples
        name = type(self.model).__name__
        if self.graphs:
            name += f".{len(self.graphs)}"
        graph = CapturedGraph(name, module, lambda: self.compiler, self.machine, autograd.run)
        self.graphs.append(graph)
        return _weakly(graph.__call__)


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


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive, for Dynamo's caches, which never end."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None, "a compiled frame outlived its model"
        return bound(*args)

    return call


def _while_it_lives(method: Callable[[], None]) -> Callable[[], None]:
    """The same; nothing happens when the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def refuse_nested(model: nn.Module) -> None:
    """Raise if a module inside of the model is megacompiled too: a parameter has one owner.

    Raises:
        ModelError: with the name of that module.
    """
    for name, module in model.named_modules():
        if module is not model and isinstance(module._compiled_call_impl, StreamedModel):
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


def _frame_of(model: nn.Module) -> Callable[..., Any]:
    """A function of the model's own that calls it, for Dynamo to capture.

    Dynamo skips frames of torch.nn itself, so `nn.Sequential` needs a frame around it; and it
    counts recompilations by code object, so each model gets one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{type(model).__name__}")
    return call


class HostApply:
    """Replaces a model's `_apply`: `model.to(device)` leaves the parameters where they are.

    Dtype changes are applied. It pickles and copies as the plain method, so a copied or loaded
    model is a plain one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.said = False

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "_apply")

    def __call__(self, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        params = {id(p) for p in self.model.parameters()}
        moved = False

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            probe = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if id(tensor) not in params or probe.device == tensor.device:
                result: torch.Tensor = function(tensor)
                return result
            moved = True
            return tensor.to(probe.dtype)

        applied: nn.Module = type(self.model)._apply(self.model, stay, recurse)
        if moved and not self.said:
            self.said = True
            warnings.warn(
                "megacompile: parameters stay in host memory and are streamed to the device; "
                "model.to(device) moved only buffers (said once)",
                stacklevel=3,
            )
        return applied
