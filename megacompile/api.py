"""The front door: `megacompile()`, `schedules()`, `trace()`.

The only file that knows passes and runtime.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from megacompile import compat, log, ops
from megacompile.errors import DeviceMemoryError, ModelError, OptionError
from megacompile.hardware import H200, Hardware, cached, load
from megacompile.ir import Capture, Code, PassRecord, Plan, Schedule, Template, Unit, format_bytes
from megacompile.optimizer_cost import OptimizerCost
from megacompile.options import Activations, Head, Lowering, Options
from megacompile.passes.chunk import STOOD_BACK, chunk_head
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
from megacompile.planner import Choice, Found, Problem, does_not_fit, search, table
from megacompile.runtime.head import bind_operators
from megacompile.runtime.host import check_host_memory
from megacompile.runtime.progress import bar
from megacompile.runtime.streamed import HostApply, StreamedModel, refuse_nested
from megacompile.runtime.trace import Trace as Trace
from megacompile.runtime.trace import Traced
from megacompile.validate import check_model, check_optimizer, host_rows
from megacompile.verify import verify

M = TypeVar("M", bound=nn.Module)

_MARGIN = 0.05  # of free device memory, for what is not planned: fragmentation, cuBLAS, NCCL
_TOLERANCE = 1.1  # how much more than there is a plan may need before it is refused

LISTENERS: list[Callable[[nn.Module], None]] = []  # told of each model that is megacompiled


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
    gpu_memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    resident: int | float | str = "auto",
    head: Head | str = "auto",
    detect_anomaly: bool = False,
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
        gpu_memory: device memory that may be used: bytes, "20GiB" or a fraction of the device's.
            Default: what is free when the plan is made, less a margin of 5 %.
        host_memory: the same of the host.
        resident: device memory for buckets that live there, with their gradients and optimizer
            states: a size, 0 or "all". Default: "auto", as much as makes the step fastest.
        head: "chunked" computes the last linear layer and its `cross_entropy` in chunks of tokens,
            gradients with it, so that no more than 1 GiB of logits is ever there; equal up to
            rounding. "whole" leaves them as they are, "auto" (default) takes chunks with Inductor
            where logits exceed 1 GiB. A head whose logits the model returns, or that does anything
            else with them, is left as it is; the schedule's plan says why.

        detect_anomaly: raise `AnomalyError` where a stage's backward gives NaN or inf; it names the
            stage, the parameter, and whether it came in or arose there. The host then waits for
            each stage. (`torch.autograd.detect_anomaly()` does so too, for NaN.)
        activations: what the backward takes from the forward. "keep" leaves every stage's saved
            tensors on the device: fastest, most memory. "selective" leaves about half of them there
            and computes the rest again. "recompute" leaves the stages' inputs there and computes
            all else again (but for the last stage, whose backward comes next). "offload" does so
            too, and lets the stages' inputs wait in host memory, so that device memory does not
            grow with the number of layers: for long contexts. "auto" (the default) keeps as many
            stages as there is room for and as pay, and offloads where nothing else fits.

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
    log.configure()
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
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        resident=resident,
        head=head,
        detect_anomaly=detect_anomaly,
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
    streamed = StreamedModel(model, options, divide, functools.partial(PassCompiler, options))
    model._compiled_call_impl = streamed
    model._apply = HostApply(model)  # type: ignore[method-assign]
    log.buckets_placed(type(model).__name__, [b.layout for b in streamed.machine.buckets.values()])
    for listener in tuple(LISTENERS):
        listener(model)
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


def trace(*models: nn.Module, hardware: Hardware | None = None) -> Trace:
    """Record when every op of megacompiled models runs, on every stream, in a `with` block.

    Nothing waits for the record: on CUDA it is timed events on the ops' own streams, read when the
    block is over. Updates that `optimizer.step()` makes on the host are in it as a lane of their
    own. Blocks may be nested, and span steps and models.

    Args:
        models: one or more.
        hardware: the machine's rates, for a prediction to hold against what is measured. Default:
            those on file, which `python -m megacompile hardware` puts there; without any there is
            no prediction.

    Raises:
        ModelError: a model is not megacompiled.

    Example::

        with megacompile.trace(model) as t:
            train_step(model, optimizer)
        print(t.table())
        t.save("step.json")  # for ui.perfetto.dev
        t.plot("step.png")
    """
    if not models:
        raise ModelError("trace(): got no model; needed at least one")
    names: dict[str, int] = {}
    traced = []
    for model in dict.fromkeys(models):
        streamed = _streamed(model, "trace")
        name = type(model).__name__
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name += f" {names[name]}"
        traced.append(Traced(name, streamed.machine, streamed.schedules))
    return Trace(traced, hardware)


def _streamed(model: nn.Module, caller: str) -> StreamedModel:
    streamed = model._compiled_call_impl
    if not isinstance(streamed, StreamedModel):
        raise ModelError(
            f"{caller}(): {type(model).__name__} is not megacompiled; "
            "call model = megacompile(model) first"
        )
    return streamed


class PassCompiler:
    """Runs the passes in order and keeps their history."""

    def __init__(self, options: Options, units: tuple[Unit, ...]) -> None:
        self.options = options
        self.units = units
        self.templates: TemplateCache = {}
        self.resident: frozenset[int] = frozenset()  # keys of the buckets on the device
        self.wanted: frozenset[int] = frozenset()  # what they should be from the next call on
        self.planned = False  # has it been decided what is resident?
        self.budget: int | None = None  # bytes of device memory
        self.needed = 0  # bytes that the largest plan takes, as predicted
        self.floors: list[int] = []  # bytes that plans take at least
        self.problem: Problem | None = None  # the last one
        self.choices: dict[Schedule, tuple[Choice, tuple[str, ...]]] = {}  # by captured stages
        bind_operators()

    def partition(self, capture: Capture) -> Schedule:
        options = self.options
        capture, reasons = chunk_head(capture, head=options.head, lowering=options.lowering)
        for reason in reasons:
            if options.head is Head.CHUNKED and reason.startswith(STOOD_BACK):
                warnings.warn(
                    f"megacompile(): {capture.name}: head='chunked', but {reason}", stacklevel=2
                )
        stages = _timed("partition", None, lambda: partition(capture, self.units))
        log.captured(capture, stages)
        return replace(stages, plan=Plan(reasons=reasons))

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
        schedule = self.plan(
            stages,
            capture,
            tangents=tangents,
            keep_last=keep_last,
            accumulate=accumulate,
            hold=hold,
            update=update,
        )
        schedule = _timed(
            "lower",
            schedule,
            lambda: lower(schedule, lowering=self.options.lowering, progress=self._progress),
        )
        log.schedule_made(schedule)
        return schedule

    def plan(
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
        """The verified schedule, whose templates have graphs and no code yet."""
        trace = functools.partial(
            trace_templates,
            ambient=capture.ambient,
            cache=self.templates,
            lowering=self.options.lowering,
        )
        schedule = replace(stages, tangents=tangents)
        schedule = _run(schedule, [("templates", trace), ("differentiate", differentiate)])
        finish = functools.partial(
            self._finish, schedule, accumulate=accumulate, hold=hold, update=update
        )
        choice, reasons = self._choose(stages, schedule, finish)
        if not keep_last:
            choice = replace(choice, keep=0)
        schedule = finish(replace(choice, resident=self.resident), reasons)
        verify(schedule)
        return schedule

    def _finish(
        self,
        schedule: Schedule,
        choice: Choice,
        reasons: tuple[str, ...] = (),
        *,
        accumulate: bool,
        hold: bool,
        update: bool,
        draft: bool = False,
    ) -> Schedule:
        """The passes behind the choice of a plan."""
        options = self.options
        share, limit = options.device_update or 0.0, math.inf
        if options.device_update is None and options.hands_over and choice.hands_over:
            share = 1.0 if options.host_is_slow else 0.4
            limit = self._budget_bytes() / 6
        plan = functools.partial(
            make_plan,
            keep=choice.keep,
            activations="offload" if choice.offload else options.activations.value,
            lookahead=options.lookahead,
            hand_over=share,
            hand_over_bytes=limit,
            resident=choice.resident,
            element_bytes=options.state_bytes,
        )
        schedule = replace(schedule, plan=Plan(reasons=(*schedule.plan.reasons, *reasons)))
        activations = functools.partial(offload_activations, lookahead=options.lookahead)
        if draft:
            schedule = replace(schedule.copy(), draft=True)
        return _run(
            schedule,
            [
                ("plan", plan),
                ("split", functools.partial(split_stages, cache=self.templates)),
                ("recompute", insert_recompute),
                ("activations", activations),
                *self._gradient_passes(accumulate=accumulate, update=update),
                ("prefetch", functools.partial(insert_prefetch, lookahead=options.lookahead)),
                ("slots", functools.partial(assign_slots, slots=options.slots, hold=hold)),
                ("free", insert_free),
            ],
        )

    def _choose(
        self, stages: Schedule, schedule: Schedule, finish: Callable[..., Schedule]
    ) -> tuple[Choice, tuple[str, ...]]:
        """What the plan is made from; sought once for each captured graph and shape."""
        options = self.options
        floor = Choice(resident=self.resident)
        if schedule.backward is None or not options.plans:
            return floor, ()
        if stages not in self.choices:
            free = options.resident is None and not self.planned
            problem = Problem(
                build=lambda choice: finish(choice, draft=True),
                buckets=schedule.buckets,
                stages=sum(stage.traced.has_backward for stage in schedule.stages),
                hardware=self._hardware(),
                optimizer=OptimizerCost.of(options),
                budget_bytes=self._budget_bytes(),
                fused=options.lowering is Lowering.INDUCTOR,
                resident=frozenset() if free else self.resident,
                trained=schedule.gradient_params,
            )
            pinned = options.activations is not Activations.AUTO
            found = search(
                problem, resident=free, pinned=pinned, hand_over=options.device_update is None
            )
            if found is None:
                found = self._too_small(problem)
            self.choices[stages] = found.choice, found.reasons
            self.needed = max(self.needed, found.peak_bytes)
            self.floors.append(problem.floor_bytes())
            self.problem = problem
            if free:
                self.planned, self.wanted = True, found.choice.resident
        return self.choices[stages]

    @staticmethod
    def _too_small(problem: Problem) -> Found:
        """Not even the floor fits. The prediction may be off by a little; then it is tried."""
        choice = Choice(0, problem.resident, hands_over=False)
        peak = problem.memory(choice).peak
        text = (
            f"device memory: {format_bytes(peak.total_bytes)} needed, "
            f"{format_bytes(problem.budget_bytes)} there"
        )
        if peak.total_bytes > _TOLERANCE * problem.budget_bytes:
            raise DeviceMemoryError(does_not_fit(problem, peak))
        return Found(choice, math.inf, peak.total_bytes, 0, (f"{text}: tried nevertheless",))

    def step_down(self) -> str:
        """Plan with less device memory from now on; "" where that changes nothing.

        What the last plan needs was too much, so the next one gets nine tenths of it.
        """
        if not self.needed or not self.options.plans:
            return ""
        floor = min(self.floors, default=0)
        if self.needed <= floor:
            return ""
        self.budget = max(int(0.9 * self.needed), floor)
        self.planned = False  # stages that have their choice keep it: a backward may be to come
        self.needed = 0
        return f"at most {format_bytes(self.budget)} of device memory"

    def needs(self) -> str:
        """What of device memory the least demanding plan needs, as a table; "" if not known."""
        if self.problem is None:
            return ""
        return table(self.problem, self.problem.floor().peak)

    def _budget_bytes(self) -> int:
        """Device memory that a plan may use: what the user said, or what was free at first."""
        if self.budget is None:
            self.budget = self.options.gpu_memory
        if self.budget is None:
            self.budget = int(compat.free_device_bytes(self.options.device) * (1 - _MARGIN))
        return self.budget

    def _hardware(self) -> Hardware:
        if self.options.device.type == "cuda":
            return load(self.options.device)
        return cached(self.options.device) or H200  # nobody measures for a plan on the CPU

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
                state_bytes=options.state_bytes,
            )
            return [("update", insert)]
        offload = functools.partial(offload_gradients, accumulate=accumulate)
        if options.lowering is Lowering.EAGER:
            return [("offload", offload)]
        give = functools.partial(insert_hand_over, state_bytes=options.state_bytes)
        return [("offload", offload), ("norms", insert_norms), ("hand_over", give)]

    def _progress(
        self, work: Iterable[tuple[Template, Code]], total: int
    ) -> Iterator[tuple[Template, Code]]:
        show = self.options.progress if self.options.lowering is Lowering.INDUCTOR else False
        with bar("compiling stages", total, show) as step:
            for item in work:
                yield item
                step(1)


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


def _run(
    schedule: Schedule, passes: Sequence[tuple[str, Callable[[Schedule], Schedule]]]
) -> Schedule:
    for name, function in passes:
        if schedule.draft:
            schedule = function(schedule)
        else:
            schedule = _timed(name, schedule, functools.partial(function, schedule))
    return schedule


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
    log.pass_done(after.name, record, history[-1].nodes if history else 0)
    return replace(after, history=(*history, record))


def _actions(schedule: Schedule) -> str:
    return "\n".join(ops.actions(graph) for graph in schedule.graphs.values())
