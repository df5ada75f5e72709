"""The front door: `megacompile()`, `schedules()`. The only file that knows passes and runtime."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from megacompile import ops
from megacompile.errors import ModelError, OptionError
from megacompile.ir import Capture, Code, PassRecord, Schedule, Template, Unit
from megacompile.options import Activations, Lowering, Options
from megacompile.passes.differentiate import differentiate
from megacompile.passes.free import insert_free
from megacompile.passes.hand_over import insert_hand_over
from megacompile.passes.lower import lower
from megacompile.passes.norms import insert_norms
from megacompile.passes.offload import offload_gradients
from megacompile.passes.offload_activations import offload_activations
from megacompile.passes.partition import partition
from megacompile.passes.plan import make_plan
from megacompile.passes.prefetch import insert_prefetch
from megacompile.passes.recompute import insert_recompute
from megacompile.passes.slots import assign_slots
from megacompile.passes.split import split_stages
from megacompile.passes.templates import TemplateCache, trace_templates
from megacompile.passes.units import find_units
from megacompile.passes.update import insert_updates
from megacompile.runtime.host import check_host_memory
from megacompile.runtime.progress import bar
from megacompile.runtime.streamed import HostApply, StreamedModel, refuse_nested
from megacompile.validate import check_model, check_optimizer, host_rows
from megacompile.verify import verify

M = TypeVar("M", bound=nn.Module)


def megacompile(
    model: M,
    *,
    device: torch.device | str | int | None = None,
    lowering: Lowering | str | None = None,
    lookahead: int = 2,
    slots: int | None = None,
    progress: bool | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | str | None = None,
    stochastic_rounding: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    device_update: float | None = None,
    activations: Activations | str = Activations.AUTO,
) -> M:
    """Keep a model's parameters and gradients in host memory and stream them through a device.

    The model is changed in place and returned: same class, same parameters, same `state_dict`
    keys. Its parameters stay `nn.Parameter`s on the host, so optimizers, clipping, schedulers and
    checkpoints work as they do for a model on the CPU; a call computes on `device`.

    Args:
        model: any `nn.Module` with dense parameters.
        device: where to compute. Default: the current CUDA device, else the CPU.
        lowering: "inductor" (default on CUDA) or "eager" (default on the CPU, bitwise equal to
            the plain model).
        lookahead: how many stages ahead a bucket is prefetched.
        slots: device buffers for prefetched buckets, at least `lookahead + 1` (the default).
        progress: show progress bars. Default: where stderr is a terminal.
        compute_dtype: torch.bfloat16 or torch.float16: float32 parameters (and floating inputs)
            are computed in it; the host keeps the float32 masters and streams a copy.
        grad_dtype: of `p.grad`, where it is not to be the parameter's.
        state_dtype: of the moments of AdamW, Adam and SGD: torch.float32, torch.bfloat16 or "int8"
            (8 bits, blockwise). Default: the parameter's, as in torch.optim.
        stochastic_rounding: let the optimizer round bfloat16 parameters up or down at random, in
            proportion, so that small updates are not lost.
        optimizer: let the backward make the update of this AdamW, Adam or SGD, stage by stage:
            gradients never reach the host, and `optimizer.step()` only counts. No clipping by the
            global norm, no `p.grad`; micro-batches go into `accumulate(model)`, but for the last.
        device_update: the share of the parameters, from 0 to 1, that `optimizer.step()` updates on
            the device: the first in forward order, while the host does the others. Their states
            come in during the backward and take device memory until the next one. Default: 0.4 (1
            with 8-bit states or stochastic rounding, which are slow on the host), as far as a
            sixth of the device's memory goes; 0 where `lowering` is "eager" or `compute_dtype` is
            set.
        activations: what the backward takes from the forward. "keep" leaves every stage's saved
            tensors on the device: fastest, most memory. "selective" leaves about half of them there
            and computes the rest again. "recompute" leaves the stages' inputs there and computes
            all else again (but for the last stage, whose backward comes next). "offload" does so
            too, and lets the stages' inputs wait in host memory, so that device memory does not
            grow with the number of layers: for long contexts. "auto" (the default) chooses; for
            now it is "recompute".

    Raises:
        ModelError: not a module, or parameters that cannot be streamed.
        OptionError: a bad option, or a second call with other options.
        HostMemoryError: parameters and gradients do not fit into host memory.

    Example::

        model = megacompile(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in data:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    options = Options.resolve(
        device=device,
        lowering=lowering,
        lookahead=lookahead,
        slots=slots,
        progress=progress,
        compute_dtype=compute_dtype,
        grad_dtype=grad_dtype,
        state_dtype=state_dtype,
        stochastic_rounding=stochastic_rounding,
        optimizer=optimizer,
        device_update=device_update,
        activations=activations,
    )
    check_model(model)
    present = model._compiled_call_impl
    if isinstance(present, StreamedModel):
        changes = present.options.differences(options)
        if changes:
            raise OptionError(
                f"megacompile(): {type(model).__name__} is megacompiled already, with other "
                f"options ({', '.join(changes)}); call it once, with the options you want"
            )
        return model
    if present is not None:
        raise OptionError(
            f"megacompile(): {type(model).__name__} was compiled with model.compile() already; "
            "leave that out: megacompile compiles it"
        )
    refuse_nested(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    check_host_memory(host_rows(model, gradients=optimizer is None))
    divide = functools.partial(find_units, compute_dtype=options.compute_dtype)
    streamed = StreamedModel(model, options, divide, functools.partial(_Compiler, options))
    model._compiled_call_impl = streamed
    model._apply = HostApply(model)  # type: ignore[method-assign]
    return model


def schedules(model: nn.Module) -> list[Schedule]:
    """The schedules that a megacompiled model has run, one for each captured graph and shape.

    Raises:
        ModelError: the model is not megacompiled.
    """
    return _streamed(model, "schedules").schedules()


def updates(model: nn.Module) -> dict[str, str]:
    """How the last `optimizer.step()` was carried out: by the unit's module path, in model order.

    "compiled to C++", "torch.optim", "torch.optim, fused", "torch.optim on the device", "torch" or
    "in the backward"; {} before the first step, and for an optimizer that runs as it is.

    Raises:
        ModelError: the model is not megacompiled.
    """
    return {name: way.value for name, way in _streamed(model, "updates").updates.ways.items()}


def _streamed(model: nn.Module, caller: str) -> StreamedModel:
    streamed = model._compiled_call_impl
    if not isinstance(streamed, StreamedModel):
        raise ModelError(
            f"{caller}(): {type(model).__name__} is not megacompiled; "
            "call model = megacompile(model) first"
        )
    return streamed


class _Compiler:
    """Runs the passes in order and keeps their history."""

    def __init__(self, options: Options, units: tuple[Unit, ...]) -> None:
        self.options = options
        self.units = units
        self.templates: TemplateCache = {}

    def partition(self, capture: Capture) -> Schedule:
        return _timed("partition", None, lambda: partition(capture, self.units))

    def build(
        self,
        stages: Schedule,
        capture: Capture,
        *,
        tangents: tuple[int, ...],
        keep_last: bool,
        accumulate: bool,
        hold: bool,
        update: bool,
    ) -> Schedule:
        options = self.options
        trace = functools.partial(
            trace_templates,
            ambient=capture.ambient,
            cache=self.templates,
            lowering=options.lowering,
        )
        passes: list[tuple[str, Callable[[Schedule], Schedule]]] = [
            ("templates", trace),
            ("differentiate", differentiate),
            ("plan", functools.partial(self._plan, keep_last=keep_last)),
            ("split", functools.partial(split_stages, cache=self.templates)),
            ("recompute", insert_recompute),
            ("activations", functools.partial(offload_activations, lookahead=options.lookahead)),
            *self._gradient_passes(accumulate=accumulate, update=update),
            ("prefetch", functools.partial(insert_prefetch, lookahead=options.lookahead)),
            ("slots", functools.partial(assign_slots, slots=options.slots, hold=hold)),
            ("free", insert_free),
        ]
        schedule = replace(stages, tangents=tangents)
        for name, function in passes:
            schedule = _timed(name, schedule, functools.partial(function, schedule))
        verify(schedule)
        return _timed(
            "lower",
            schedule,
            lambda: lower(schedule, lowering=options.lowering, progress=self._progress),
        )

    def _plan(self, schedule: Schedule, *, keep_last: bool) -> Schedule:
        options = self.options
        share, limit = options.device_update or 0.0, math.inf
        if options.device_update is None and options.hands_over:
            share = 1.0 if options.host_is_slow else 0.4
            limit = torch.cuda.get_device_properties(options.device).total_memory / 6
        return make_plan(
            schedule,
            keep_last=keep_last,
            activations=options.activations.value,
            lookahead=options.lookahead,
            hand_over=share,
            hand_over_bytes=limit,
            element_bytes=_state_bytes(options) + 4.0,  # the gradient, and the streamed copy
        )

    def _gradient_passes(
        self, *, accumulate: bool, update: bool
    ) -> list[tuple[str, Callable[[Schedule], Schedule]]]:
        """What becomes of the gradients: they are offloaded, or updates are made of them."""
        options = self.options
        if update:
            insert = functools.partial(
                insert_updates,
                accumulate=accumulate,
                lookahead=options.lookahead,
                masters=options.compute_dtype is not None,
                state_bytes=_state_bytes(options),
            )
            return [("update", insert)]
        offload = functools.partial(offload_gradients, accumulate=accumulate)
        if options.lowering is Lowering.EAGER:
            return [("offload", offload)]
        give = functools.partial(insert_hand_over, state_bytes=_state_bytes(options))
        return [("offload", offload), ("norms", insert_norms), ("hand_over", give)]

    def _progress(
        self, work: Iterable[tuple[Template, Code]], total: int
    ) -> Iterator[tuple[Template, Code]]:
        show = self.options.progress if self.options.lowering is Lowering.INDUCTOR else False
        with bar("compiling stages", total, show) as step:
            for item in work:
                yield item
                step(1)


def _state_bytes(options: Options) -> float:
    """Bytes of an element's two moments, and of its parameter on the way back."""
    dtype = options.state_dtype
    moment = 1.0 if dtype == "int8" else 4.0
    if isinstance(dtype, torch.dtype):
        moment = float(dtype.itemsize)
    return 2 * moment + (4.0 if options.compute_dtype is not None else 2.0)


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Around the backward of a micro-batch that is not the last, where the backward updates.

    Its gradients go to the host, as they do without `megacompile(model, optimizer=...)`; the
    backward behind it, outside of `accumulate`, adds them and makes the update.

    Raises:
        ModelError: the model is not megacompiled, or does not update in the backward.

    Example::

        for k, (x, y) in enumerate(micro_batches):
            last = k + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accumulate(model):
                (model(x, y) / len(micro_batches)).backward()
        optimizer.step()
    """
    streamed = model._compiled_call_impl
    updates = streamed.machine.in_backward if isinstance(streamed, StreamedModel) else None
    if updates is None:
        raise ModelError(
            f"accumulate(): {type(model).__name__} was not megacompiled with optimizer=...; "
            "without it every backward accumulates, and there is nothing to mark"
        )
    before, updates.accumulating = updates.accumulating, True
    try:
        yield
    finally:
        updates.accumulating = before


def _timed(name: str, before: Schedule | None, function: Callable[[], Schedule]) -> Schedule:
    start = time.perf_counter()
    after = function()
    record = PassRecord(
        name=name,
        before="" if before is None else _actions(before),
        after=_actions(after),
        time_s=time.perf_counter() - start,
        nodes=sum(len(graph.nodes) for graph in after.graphs.values()),
    )
    history: tuple[Any, ...] = () if before is None else before.history
    return replace(after, history=(*history, record))


def _actions(schedule: Schedule) -> str:
    return "\n".join(ops.actions(graph) for graph in schedule.graphs.values())
