"""A model whose parameters live in host buckets, and its call:

1. Adopt what the user changed since the last call: replaced storages, new parameters, buffers.
2. Move inputs to the compute device.
3. Swap the proxies in, run the captured model, swap them out.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat, notices, progress
from megacompile.errors import ModelError
from megacompile.plan.explanation import summary
from megacompile.plan.scenario import Scenario
from megacompile.plan.setting import Setting
from megacompile.runtime.checkpoint.contents import Contents
from megacompile.runtime.device.background import WeakIdSet
from megacompile.runtime.model import methods, own_operators
from megacompile.runtime.model.captures import Captures, tracing
from megacompile.runtime.model.methods import State
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.restore import Released
from megacompile.runtime.ops.head import bind_operators
from megacompile.runtime.params import shared_memory, swap
from megacompile.runtime.params.guards import opened
from megacompile.runtime.params.looks import parameter_of
from megacompile.runtime.params.proxies import StreamedParameter, as_gradient_of
from megacompile.runtime.params.swap import StandIns, Undos, undone
from megacompile.runtime.step import hooks
from megacompile.runtime.step.step import Updates
from megacompile.runtime.updates.in_backward import InBackward
from megacompile.views.metrics import token_count


class StreamedModel:
    """Implements a model's `__call__`; stored in `model._compiled_call_impl`. The model is changed
    in place: its parameters become views of buckets. `contents` has values for a model without
    values; host memory has `new_bytes` for parameters that are not there yet."""

    def __init__(
        self, model: nn.Module, setting: Setting, contents: Contents | None, new_bytes: int
    ) -> None:
        self.model = model
        self.options = options = setting.options
        if options.device.type == "cuda":
            compat.use_expandable_segments()  # a plan counts bytes, not fragments
        compat.settle_cache_keys()
        compat.wait_for_scales()
        compat.write_powers()
        compat.note_backward_calls(parameter_of, as_gradient_of)
        compat.note_uncaptured()
        compat.follow_containers()
        compat.skip_untraced(StreamedModel._run.__code__, tracing)
        compat.convert_in_place(StreamedParameter)
        compat.leave_out_of_copies(StreamedModel, methods.ModuleCall, methods.Replacement)
        compat.show_classes(StreamedParameter)
        self.buckets = ModelBuckets(model, setting, contents, new_bytes)
        self.machine = self.buckets.machine
        self.updates = Updates(self.machine, options, self.buckets.rest, _weakly(self._before_step))
        self.captures = Captures(self.buckets, self.updates, StreamedModel._run.__code__)
        self.released = Released(self.buckets, self.updates)
        if options.optimizer is not None:
            self.machine.in_backward = InBackward(
                options.optimizer, self.updates.parts.in_backward, self.machine.staging
            )
            hooks.attach(options.optimizer)
        self._ends: list[Callable[[], object]] = []
        self._methods = methods.ClassMethods(model)
        self._compiled: dict[State, Callable[..., Any]] = {}
        self.parts = methods.ModuleCalls(model, self)
        bind_operators()
        self.called = False
        self._tokens = 0  # of the last call before the first step
        LIVE.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None: a copied model is a plain one, even if its class copies its `__dict__`."""
        return type(None), ()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if tracer := compat.tracer_around():
            self._refuse(tracer)
        return undone(functools.partial(self.call_module, self.model, self._compiled, args, kwargs))

    def call_module(
        self,
        module: nn.Module,
        compiled: dict[State, Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        undos: Undos,
    ) -> Any:
        """Call the model, or a module in it; `compiled`: captures, by the state of its methods."""
        swap.hold(self.buckets.alone, undos)
        undos.append(self.buckets.notice.forget)
        if self.released.depth or self.released.away:
            self.released.check()
        self.called = True
        state = self._methods.state()
        if state not in compiled:
            compiled[state] = self._compile(module)
        modules = compat.modules_of(self.model)
        stand_ins = undone(functools.partial(self._adopt, modules, undos))
        if compat.in_transform() and not compat.given_to_functional_call():
            self._refuse("torch.func")
        device, computes_in = self.options.device, self.options.compute_dtype
        leaves = compat.leaves((args, kwargs))
        if (meter := self.machine.meter) is not None:
            meter.call(module, leaves)
        if not self.machine.steps:
            self._tokens = token_count(leaves)
        for value in leaves:
            if isinstance(value, torch.Tensor) and (
                value.device != device or (computes_in and value.dtype == torch.float32)
            ):
                args, kwargs = shared_memory.moved(args, kwargs, self._to_device)
                break
        run = functools.partial(self._run, stand_ins, modules, args, kwargs)
        return self.captures.call(run, compiled[state], modules)

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        """A call of the model, or of a module in it, for Dynamo to capture."""
        frame = compat.frame_of(module, f"call_{type(module).__name__}")
        backend = _weakly(self._capture)
        end = weakref.finalize(self, compat.forget_compiled, frame.__code__, backend)
        end.atexit = False
        self._ends.append(end)
        return torch.compile(
            frame,
            backend=backend,
            options={"guard_filter_fn": _needed_guards},
            dynamic=self.options.dynamic,
        )

    def end(self) -> None:
        """Make the model a plain one again."""
        LIVE.discard(self)
        self.parts.end()
        for end in self._ends:
            end()

    def _refuse(self, tracer: str) -> None:
        raise ModelError(
            f"{type(self.model).__name__}: called within {tracer}, which needs ordinary "
            "parameters; use a plain model there: copy.deepcopy(model)"
        )

    def _run(
        self,
        stand_ins: StandIns | None,
        modules: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        undos: Undos,
    ) -> Any:
        undos.append(functools.partial(compat.set_dynamo_options, compat.dynamo_options()))
        compat.set_dynamo_options(compat.CALL_OPTIONS)
        compat.hide_fake_errors(undos)
        own_operators.swap_in(modules, self.options.device, undos)
        if stand_ins is not None:
            stand_ins.put_in(self._stand_in, undos)
        swap.replace(*self.parts.columns, undos)  # the modules' plain calls
        self.buckets.proxies.swap_in(undos)
        return call(*args, **kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The proxy of a parameter in a call, if a functional call passes this tensor."""
        proxy = self.buckets.proxies.of(opened(tensor))  # it may be a parameter of another model
        result: torch.Tensor = self._to_device(tensor) if proxy is None else proxy
        return result

    def _is_in_a_call(self) -> bool:
        """True if the model calls itself; then its parameters are proxies as intended."""
        code, frame = StreamedModel._run.__code__, sys._getframe(1).f_back
        while frame and not (frame.f_code is code and frame.f_locals["self"] is self):
            frame = frame.f_back
        return frame is not None

    def refuse_in_use(self, caller: str, *, in_backward: bool = True) -> None:
        """Raise during a call of this model in this thread, or during a backward."""
        is_called = self._is_in_a_call()
        if is_called or (in_backward and self.machine.run):
            where = "a call" if is_called else "a backward"
            raise ModelError(
                f"{caller}: {type(self.model).__name__} is in the middle of {where}; call it "
                "between two steps"
            )

    def _within_torch_compile(self) -> None:
        notices.warn_once(
            "within torch.compile",
            f"megacompile: {type(self.model).__name__} is called from code that torch.compile "
            "captures, which skips the model: megacompile compiles it (shown once); leave out "
            "torch.compile if it wraps only the model",
            of=self,
        )

    __call__ = compat.opaque(
        _call,
        reason="megacompile compiles this model itself; leave out fullgraph=True, or torch.compile",
        on_capture=_within_torch_compile,
    )

    def _before_step(self) -> None:
        """Called when an optimizer's step begins."""
        if self.released.depth or self.released.away:
            self.released.check()
        self.buckets.before_step()
        self.captures.warn_of_views()
        if self.machine.steps == 1:
            self._tell_plan()
        if (meter := self.machine.meter) is not None:
            meter.step()

    def _tell_plan(self) -> None:
        """Show the plan of a training step in one line, if the machine's rates are known."""
        made = [each for each in self.captures.newest()[1] if each.backward is not None]
        if self.options.progress is False or not made:
            return
        compiler = self.buckets.plans.compiler
        rates = compiler.setting.measured_rates()
        if rates is None:
            return
        count = sum(parameter.numel() for parameter in self.model.parameters())
        now = Scenario.of(compiler, made, rates)
        progress.tell(summary(now, type(self.model).__name__, count, self._tokens))

    def _adopt(self, modules: Sequence[nn.Module], of_call: Undos, undos: Undos) -> StandIns | None:
        """Adopt changes; returns the tensors of a functional call."""
        swap.use_unguarded(undos)
        with compat.outside_inference_mode(), compat.on_host():
            if StreamedModel in map(type, map(compat.compiled_call, modules[1:])):
                refuse_nested(self.model)
            buckets = self.buckets
            stand_ins = None
            fits = buckets.proxies.fits(self.model, modules)
            if not fits and not self._is_in_a_call():
                buckets.proxies.put_back()  # left by a call that was interrupted twice
                stand_ins = buckets.proxies.stand_ins(self.model)
                stand_ins.take_out(of_call)
                fits = buckets.proxies.fits(self.model, modules)
            if not fits:
                refuse_shared(self.model)
            buckets.refresh(fits, modules)
        if not fits:
            self.parts.put_in()
        self.buckets.follow_plans()
        return stand_ins

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        """An input on the device, in the dtype of the computation; the same object if it is."""
        dtype = self.options.compute_dtype if value.dtype == torch.float32 else None
        cast = value.to(dtype or value.dtype)
        return compat.keep_dynamic_marks(value, cast.to(self.options.device))

    def _capture(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend: adds a captured graph."""
        compat.put_inputs_first(module)
        self._methods.find()
        return _weakly(self.captures.add(module).__call__)


def refuse_nested(model: nn.Module) -> None:
    """Raise a ModelError if a submodule is megacompiled too: a parameter has one owner."""
    for name, module in model.named_modules():
        if module is not model and isinstance(compat.compiled_call(module), StreamedModel):
            raise ModelError(
                f"{type(model).__name__}.{name} is megacompiled itself; megacompile only the "
                "outermost module that is called (copy.deepcopy of the other is a plain module)"
            )


LIVE: WeakIdSet[StreamedModel] = WeakIdSet()


def refuse_shared(model: nn.Module) -> None:
    """Raise a ModelError if another megacompiled model owns a parameter of this model: two owners
    would keep it in two buckets, and each would update it in `optimizer.step()`."""
    if _owned(model):
        gc.collect()  # collects unreferenced models
    for owner, name, param in _owned(model):
        names = [n for n, p in owner.model.named_parameters() if p is param]
        if names:
            raise ModelError(
                f"megacompile(): parameter {type(model).__name__}.{name} is owned by another "
                f"megacompiled model ({type(owner.model).__name__}.{names[0]} there), and a "
                "parameter has one owner; megacompile one module that has both and calls them, "
                "give one of them a copy of the parameter, or call megacompile.unmegacompile() on "
                "the other model"
            )
        if owner.buckets.owns(param):  # the other model no longer has it
            owner.buckets.let_go()


def _owned(model: nn.Module) -> list[tuple[StreamedModel, str, nn.Parameter]]:
    """Other megacompiled models with parameters of this one."""
    return [
        (other, name, param)
        for other in LIVE
        if other.model is not model
        for name, param in model.named_parameters()
        if other.buckets.owns(param)
    ]


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Dynamo's guards, except those on a proxy's attributes: proxies are the same in every call.

    The omitted guards are Python functions, two per parameter, and take half of the time of all
    guards; and the host tensor has the same metadata as the proxy. An exception from a signal
    handler inside a guard is lost, and the model is captured again.
    """
    compat.forget_missing()  # Dynamo evaluated the guards for this filter
    proxies = {guard.name for guard in guards if isinstance(guard.value, StreamedParameter)}
    hosts = {f"{name}.host" for name in proxies}
    return [
        not (
            guard.name in hosts
            or (guard.guard_type == compat.SUBCLASS_GUARD and guard.name in proxies)
            or (guard.name.endswith(compat.INNER_NAMES) and guard.value == ["host"])
        )
        for guard in guards
    ]


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method with a weak reference to its object, for optimizers and for Dynamo's caches,
    which are never freed. It does nothing once the object is freed."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call


def streamed_model(model: nn.Module, caller: str) -> StreamedModel:
    """The streamed model of a megacompiled model, also under `torch.compile`. Raises a ModelError
    if the model is not megacompiled."""
    is_module = isinstance(model, nn.Module)  # users pass optimizers, too
    streamed = compat.compiled_call(compat.without_torch_compile(model)) if is_module else None
    if not isinstance(streamed, StreamedModel):
        raise ModelError(
            f"{caller}(): {type(model).__name__} is not megacompiled; "
            "call model = megacompile(model) first"
        )
    return streamed


def streamed_around(module: nn.Module, caller: str) -> StreamedModel:
    """The streamed model that owns a submodule's parameters. Raises a ModelError: there is none."""
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    for streamed in LIVE:
        if streamed.model is module or any(map(streamed.buckets.owns, params)):
            return streamed
    return streamed_model(module, caller)
