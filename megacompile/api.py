"""The front door: `megacompile()`, `save()`, `schedules()`, `updates()`, `trace()`, `explain()`.

Nothing below it knows both `plan` and `runtime`; it joins them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from megacompile import compat, log
from megacompile.cost.hardware import Hardware
from megacompile.errors import ModelError, NoScheduleError, OptionError, OptionTypeError
from megacompile.host_memory import budget_bytes, check_host_memory
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Head, Lowering, Options
from megacompile.passes.stages.units import find_units
from megacompile.plan.alternatives import Planned, alternatives, more_memory
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.explanation import Explanation, explanation
from megacompile.plan.scenario import Scenario
from megacompile.runtime.checkpoint.checkpoint import Checkpoint as Checkpoint
from megacompile.runtime.checkpoint.contents import Contents, on_meta
from megacompile.runtime.checkpoint.save import save as save
from megacompile.runtime.model.lookup import streamed_model
from megacompile.runtime.model.methods import replace_methods
from megacompile.runtime.model.owners import refuse_shared
from megacompile.runtime.model.parts import is_part
from megacompile.runtime.model.streamed import StreamedModel, refuse_nested
from megacompile.tracing.recorder import Trace as Trace
from megacompile.tracing.recorder import Traced
from megacompile.validate import (
    check_model,
    check_optimizer,
    held_bytes,
    host_rows,
    warn_of_rounding,
)

M = TypeVar("M", bound=nn.Module)


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
    disk: str | os.PathLike[str] | None = None,
    disk_memory: int | float | str | None = None,
    disk_weights: bool = False,
    disk_saved: bool | None = None,
    resident: int | float | str = "auto",
    head: Head | str = "auto",
    detect_anomaly: bool = False,
    activations: Activations | str = Activations.AUTO,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    dynamic: bool | None = None,
) -> M:
    """Keep a model's parameters and gradients in host memory and stream them through a device.

    The model is changed in place and returned: same class, same parameters, same `state_dict`
    keys. Its parameters stay `nn.Parameter`s, on the host or, as far as they fit, on the device.
    Optimizers, clipping, schedulers and checkpoints work as for any model. A call computes on
    `device`.

    Args:
        model: any `nn.Module` with dense parameters.
        device: where to compute. Default: the current CUDA device, else the CPU.
        lowering: "inductor" (default on CUDA) or "eager" (default on the CPU, bitwise equal to
            the plain model).
        lookahead: how many stages ahead a bucket is prefetched.
        slots: device buffers for prefetched buckets, at least `lookahead + 1`. Default: that
            many, and more if the plan finds that more make the step faster.
        progress: show bars, and what the first step waits for. Default: where stderr is a terminal.
        compute_dtype: torch.bfloat16 or torch.float16. Float32 parameters and floating inputs are
            computed in it. The host keeps the float32 masters and streams a copy.
        grad_dtype: the dtype of `p.grad`. Default: the parameter's.
        state_dtype: the dtype of the optimizer's moments: torch.float32, torch.bfloat16 or "int8"
            (8 bits, blockwise). Default: the parameter's, as in torch.optim. Optimizers without a
            rule in `runtime/optim`, such as Muon, ignore it with a warning.
        stochastic_rounding: the optimizer rounds bfloat16 parameters up or down at random, in
            proportion, so that small updates are not lost. Warns if no parameter is bfloat16.
        optimizer: one with a rule in `runtime/optim` (AdamW, Adam, SGD, Lion), whose update the
            backward makes, stage by stage. Gradients never reach the host, and `optimizer.step()`
            only counts. There is no clipping by the global norm, no `p.grad` and no GradScaler;
            `clip_grad_norm_(parameters, inf)` gives the norm.
            Micro-batches but the last go into `accumulate(model)`.
        device_update: the share of the parameters, from 0 to 1, that `optimizer.step()` updates on
            the device: the first in forward order. Their states come in during the backward and
            take device memory until the middle of the next forward. Meanwhile the host updates the
            others, and the device helps it from the other end, in chunks. With 0 the host updates
            alone. With `disk`, it is a share of those whose states lie on the host. Default: what
            the plan finds best; none on the CPU, with `lowering="eager"`, with `compute_dtype` or
            with `disk_weights`.
        gpu_memory: device memory that may be used: bytes, "20GiB" or a fraction of the device's.
            Default: what is free when the plan is made, less 5 %, but 4 GiB at most.
        host_memory: host memory for parameters, gradients, optimizer states and what waits there,
            in the same forms. Default: what is free, less 4 %, but 6 GiB at most. What does not
            fit lives on the device or, with `disk`, there; else `HostMemoryError` is raised.
        disk: a folder on a fast local disk, where optimizer states lie that host memory does not
            hold, in a file that is gone when the process is. Each step reads and writes all that
            lie there. Without a plan (on the CPU) those of all streamed buckets do.
        disk_memory: what they may take there, in the same forms. Default: what is free.
        disk_weights: the parameters of streamed buckets lie there too. Each forward reads them, and
            each backward; trained ones are written with every update. Not with `compute_dtype`.
        disk_saved: what waits on the host between forward and backward goes on to the disk, and
            back, in each step: with `activations="offload"` the inputs of stages. Default: as
            little of it as host memory asks for, where a plan is made; False: none.
        resident: device memory for buckets that live there, with their gradients (none of them with
            `optimizer`) and optimizer states: a size, 0 or "all". Default: "auto", as much as makes
            the step fastest.
        head: "chunked" computes the last linear layer, its `cross_entropy` and their gradients in
            chunks of tokens. At most 1 GiB of logits exists at a time; results are equal up to
            rounding. "whole" leaves the head as it is. "auto" (default) uses chunks with Inductor
            where logits exceed 1 GiB. A head whose logits have another reader stays whole, and the
            schedule's plan says why.
        detect_anomaly: raise `AnomalyError` if a stage's backward gives NaN or inf. The error names
            the stage and the parameter, and says whether the NaN came in or arose there. The host
            then waits for each stage. `torch.autograd.detect_anomaly()` does the same for NaN.
        activations: what the backward takes from the forward. "keep" leaves every stage's saved
            tensors on the device: fastest, most memory. "selective" leaves about half of them there
            and recomputes the rest. "recompute" leaves the stages' inputs there and recomputes
            everything else, except for the last stage, whose backward comes next. "offload" does
            the same with the stages' inputs in host memory, so that device memory does not grow
            with the number of layers: for long contexts. "auto" (default) keeps as many stages as
            fit and make the step faster, and offloads if nothing else fits.
        checkpoint: a folder or file of safetensors, whose tensors are read straight into the
            model's host memory; or a `megacompile.Checkpoint`, which says more. Default: the
            model's own values. What is on meta is initialised at random, on the CPU: by
            `_init_weights` of transformers, else by the modules' `reset_parameters()`.
        dynamic: as in `torch.compile`. None (default): a size that has changed is a symbol from
            then on, and one program serves all its values. True: sizes are symbols from the start.
            False: each set of sizes gets code of its own.

    Raises:
        ModelError: the argument is no module, its parameters cannot be streamed, or another
            megacompiled model has one of them.
        OptionError: a bad option, or a second call with other options.
        DiskError: no file can be made in `disk`, or the parameters do not fit there.
        HostMemoryError: parameters and gradients do not fit into host memory. The first call
            raises it where they do not fit with optimizer states and what waits there.
        CheckpointError: the checkpoint is not whole, does not fit the model, or cannot be read. The
            model is as it was.
        MissingExtraError: `checkpoint` was given, and safetensors is not installed.

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
        disk=disk,
        disk_memory=disk_memory,
        disk_weights=disk_weights,
        disk_saved=disk_saved,
        resident=resident,
        head=head,
        detect_anomaly=detect_anomaly,
        activations=activations,
        dynamic=dynamic,
    )
    check_model(model, meta=True)
    present = compat.compiled_call(model)
    if is_part(present):  # another model's: what has its parameters says more
        present = None
    if isinstance(present, StreamedModel):
        changes = present.options.differences(options)
        if changes:
            raise OptionError(
                f"megacompile(): {type(model).__name__} is megacompiled already, with other "
                f"options ({', '.join(changes)}); call it once, with the options you want"
            )
        if checkpoint is not None:
            raise OptionError(
                f"megacompile(): {type(model).__name__} is megacompiled already, and has values; "
                "give checkpoint= in the first call, or use model.load_state_dict()"
            )
        return model
    if present is not None:
        raise OptionError(
            f"megacompile(): {type(model).__name__} was compiled with model.compile() already; "
            "leave that out: megacompile compiles it"
        )
    refuse_nested(model)
    refuse_shared(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    if options.stochastic_rounding:
        warn_of_rounding(model)
    contents = _contents(model, checkpoint)
    on_device = 0 if options.resident == 0 else _device_bytes(options)
    rows = host_rows(
        model,
        gradients=optimizer is None,
        device_bytes=on_device,
        on_disk=options.disk_weights,
    )
    check_host_memory(rows, options.host_memory)
    host_bytes = budget_bytes(held_bytes(model)) if options.device.type == "cuda" else None
    divide = functools.partial(find_units, compute_dtype=options.compute_dtype)
    compiler = functools.partial(PassCompiler, options, host_bytes=host_bytes)
    with compat.on_host():
        streamed = StreamedModel(model, options, divide, compiler, contents)
    compat.set_compiled_call(model, streamed)
    replace_methods(model)
    log.buckets_placed(type(model).__name__, [b.layout for b in streamed.machine.buckets.values()])
    for listener in tuple(LISTENERS):
        listener(model)
    return model


def _device_bytes(options: Options) -> int:
    """Device memory that buckets may live in; on the CPU it is the host's."""
    if options.device.type != "cuda":
        return 0
    return options.gpu_memory or compat.free_device_bytes(options.device)


def _contents(
    model: nn.Module, checkpoint: str | os.PathLike[str] | Checkpoint | None
) -> Contents | None:
    """What fills a model; None where it has its values."""
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike, Checkpoint)):
        raise OptionTypeError(
            f"megacompile(): option 'checkpoint' got {type(checkpoint).__name__}; needed a path "
            "(a folder of safetensors) or a megacompile.Checkpoint"
        )
    if checkpoint is None and not on_meta(model):
        return None
    with compat.on_host():
        return Contents(model, None if checkpoint is None else Checkpoint.of(checkpoint))


def schedules(model: nn.Module) -> list[Schedule]:
    """The schedules that a megacompiled model has run: one for each captured graph and shape.

    Raises:
        ModelError: the model is not megacompiled; or, where one of none is asked for, none has run.
    """
    streamed = streamed_model(model, "schedules")
    return _Schedules(type(model).__name__, streamed)


class _Schedules(list[Schedule]):
    """A list that says why it is empty."""

    def __init__(self, name: str, streamed: StreamedModel) -> None:
        super().__init__(streamed.schedules())
        self.why = (
            "everything that it has captured ran in eager mode, as a warning said"
            if streamed.graphs
            else "Dynamo has captured nothing of it, as a warning said"
            if streamed.called
            else "it was not called since; call model(...) on a batch first (or a module in it)"
        )
        self.name = name

    def __getitem__(self, index: Any) -> Any:
        if not self and not isinstance(index, slice):
            raise NoScheduleError(f"schedules(): {self.name} has none: {self.why}")
        return super().__getitem__(index)


def updates(model: nn.Module) -> dict[str, str]:
    """The update path of each unit in the last `optimizer.step()`, by module path, in model order.

    For example "compiled to C++", "torch.optim", "torch.optim, fused", "torch.optim on the device",
    "torch" (also until the C++ is compiled) or "in the backward". Empty before the first step, and
    for an optimizer that runs as it is.

    Raises:
        ModelError: the model is not megacompiled.
    """
    return {name: way.value for name, way in streamed_model(model, "updates").updates.ways.items()}


def trace(*models: nn.Module, hardware: Hardware | None = None) -> Trace:
    """Record when every op of megacompiled models runs, on every stream, in a `with` block.

    Nothing waits for the record: on CUDA it is timed events on the ops' own streams, which are read
    when the block is over. Updates that `optimizer.step()` makes on the host have a lane of their
    own. Blocks may be nested, and may span steps and models.

    Args:
        models: one or more.
        hardware: the machine's rates, from which a prediction is made. Default: those on file,
            which `python -m megacompile hardware` puts there. Without any there is no prediction.

    Raises:
        ModelError: no model was given, or one is not megacompiled.

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
        streamed = streamed_model(model, "trace")
        name = type(model).__name__
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name += f" {names[name]}"
        compiler = streamed.buckets.plans.compiler
        cost = compiler.setting.cost() if isinstance(compiler, PassCompiler) else None
        traced.append(Traced(name, streamed.machine, streamed.schedules, cost))
    found = Trace(traced, hardware)
    for model in models:
        _TRACES[streamed_model(model, "trace")] = ref(found)
    return found


def explain(
    model: nn.Module,
    *,
    trace: Trace | None = None,
    hardware: Hardware | None = None,
    changes: bool = True,
) -> Explanation:
    """What a megacompiled model's step does and why, on one screen.

    It shows the stages; where every byte is, on the device and on the host; the plan and its
    reasons; how busy each stream is and what bounds the step; what would help, and by how much.
    Times are predicted for a step in the middle of training. A trace puts measured times beside
    them. The optimizer is assumed to be an AdamW with the states that the options name.

    Args:
        model: a model that has run a step. Its newest schedules are explained.
        trace: a trace of whole steps of the model. Default: the last one taken, if it still exists.
        hardware: the machine's rates. Default: on CUDA those measured (once, in seconds); on the
            CPU those on file, or those of an H200.
        changes: try other plans too. Each takes about as long as planning did.

    Returns:
        An object to `print()`. `to_dict()` is for programs, and notebooks show it as tables.

    Raises:
        ModelError: the model is not megacompiled, or has not run.

    Example::

        with megacompile.trace(model):
            train_step(model, optimizer)
        print(megacompile.explain(model))
    """
    streamed = streamed_model(model, "explain")
    name = type(model).__name__
    planned, made = _newest(streamed)
    if not made:
        raise ModelError(f"explain(): {name} has not run yet; call it on a batch first")
    options, compiler = streamed.options, streamed.buckets.plans.compiler
    assert isinstance(compiler, PassCompiler)
    machine = hardware or compiler.setting.rates()
    there = compiler.budget.limit_bytes or machine.device_bytes
    now = Scenario(
        tuple(made),
        machine,
        compiler.setting.cost(),
        options.lowering is Lowering.INDUCTOR,
        there,
        compiler.setting.host_budget_bytes() or machine.host_bytes,
        compiler.chooser.disk_budget_bytes(),
    )
    if trace is None and streamed in _TRACES:
        trace = _TRACES[streamed]()
    on_gpu = options.device.type == "cuda"
    plans = options.plans and any(schedule.backward is not None for schedule in made)
    return explanation(
        now,
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        traced=None if trace is None else trace.measured,
        rebuilt=alternatives(compiler, planned, now) if plans and changes else None,
        more=more_memory(compiler, planned, now) if plans and changes else None,
        try_changes=changes,
        locked_bytes=streamed.machine.host_budget.locked_bytes if on_gpu else None,
    )


# The last trace of each model, as long as somebody else keeps it.
_TRACES: WeakKeyDictionary[StreamedModel, ref[Trace]] = WeakKeyDictionary()


def _newest(streamed: StreamedModel) -> tuple[list[Planned], list[Schedule]]:
    """Each captured graph's schedule of the newest shape: that of a training step, if any ran."""
    planned, schedules = [], []
    for graph in streamed.current():
        ran = [
            (program, variant, executor.schedule)
            for program in graph.programs.values()
            if program is not None
            for variant, executor in program.executors.items()
        ]
        trained = [each for each in ran if each[2].backward is not None]
        if ran:
            program, variant, schedule = (trained or ran)[-1]
            planned.append(Planned(program.stages, program.capture, variant))
            schedules.append(schedule)
    return planned, schedules


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Mark the backward of a micro-batch that is not the last, with `optimizer=`.

    Its gradients go to the host, as they do without `megacompile(model, optimizer=...)`; those of
    layers that live on the device stay there. The next backward outside of `accumulate` adds them
    and makes the update. Without such a one,
    `optimizer.step()` makes it. In the loops of Accelerate, Trainer and TRL there is nothing to
    mark: which micro-batch is the last is read where Accelerate notes it.

    Raises:
        ModelError: the model is not megacompiled, or does not update in the backward.

    Example::

        for k, (x, y) in enumerate(micro_batches):
            last = k + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accumulate(model):
                (model(x, y) / len(micro_batches)).backward()
        optimizer.step()
    """
    streamed = compat.compiled_call(model)
    updates = streamed.machine.in_backward if isinstance(streamed, StreamedModel) else None
    if updates is None:
        raise ModelError(
            f"accumulate(): {type(model).__name__} was not megacompiled with optimizer=...; "
            "without it every backward accumulates, and there is nothing to mark"
        )
    before, updates.marked = updates.marked, True
    try:
        yield
    finally:
        updates.marked = before
