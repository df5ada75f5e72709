"""The public functions `schedules()`, `updates()`, `trace()`, `metrics()` and `explain()`."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, ref

from torch import nn

from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import active_parameters
from megacompile.errors import ModelError
from megacompile.ir.schedule import Schedule
from megacompile.log import UPDATES
from megacompile.plan import scenario
from megacompile.plan.explanation import Explanation
from megacompile.plan.scenario import Scenario
from megacompile.runtime.device.replay import captured
from megacompile.runtime.model.streamed import StreamedModel, streamed_model
from megacompile.views.metrics import Meter
from megacompile.views.metrics import Metrics as Metrics
from megacompile.views.recorder import Trace as Trace
from megacompile.views.recorder import Traced


def schedules(model: nn.Module) -> list[Schedule]:
    """Return the schedules that a megacompiled model has run, one for each captured graph and
    shape; [] if it has run none, and `explain(model)` says why.

    Raises:
        ModelError: the model is not megacompiled.
    """
    return streamed_model(model, "schedules").captures.schedules()


def updates(model: nn.Module) -> dict[str, str]:
    """Return the backend that updated each unit in the last `optimizer.step()`, by module path, in
    model order.

    Examples: "compiled to C++", "torch.optim", "torch.optim on the device",
    "torch" (also until the C++ is compiled), "in the backward". Empty before the first step, and
    for an optimizer that runs unchanged.

    Raises:
        ModelError: the model is not megacompiled.
    """
    return dict(streamed_model(model, "updates").updates.parts.backends)


def trace(*models: nn.Module, hardware: Hardware | None = None) -> Trace:
    """Record when each op of megacompiled models runs, on each stream, within a `with` block.

    Recording adds no synchronization: on CUDA it uses timed events on the ops' own streams, read
    after the block. Updates on the host have their own lane. Blocks may be nested, and may span
    steps and models.

    Args:
        models: one or more.
        hardware: the machine's rates, for a prediction next to the measured times. Default: the
            rates saved by `python -m megacompile hardware`. Without rates there is no prediction.

    Raises:
        ModelError: no model was given, or one is not megacompiled.

    Example::

        with megacompile.trace(model) as t:
            train_step(model, optimizer)
        print(t.table())
        t.save("step.json")  # for ui.perfetto.dev
    """
    if not models:
        raise ModelError("trace(): got no model; needed at least one")
    made = _trace(models, hardware)
    for model in models:
        _TRACES[streamed_model(model, "trace")] = ref(made)
    return made


def _trace(
    models: Sequence[nn.Module],
    hardware: Hardware | None = None,
    *,
    patience_s: float | None = None,
) -> Trace:
    names: dict[str, int] = {}
    traced = []
    for model in dict.fromkeys(models):
        streamed = streamed_model(model, "trace")
        name = type(model).__name__
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name += f" {names[name]}"
        cost = streamed.buckets.setting.cost()
        traced.append(Traced(name, streamed.machine, cost))
    return Trace(traced, hardware, patience_s)


def metrics(model: nn.Module) -> Metrics:
    """Measure a model's training while it runs: rates, waits and memory of the last steps.

    The first call starts the measurement and returns no rates yet. From then on, each call of the
    model and each `optimizer.step()` is counted on the host, without waiting for the device. Times
    and rates are means of the last 20 steps, without those that compiled code, or evaluated (made
    more calls without gradients than most did). Three of 50 steps are traced for `waits`, as by
    `trace()`, except while a model that fits runs from CUDA graphs.

    `tflop_s` counts 6 FLOPs per parameter and token (Kaplan et al., 2020, arXiv 2001.08361), 4 of
    a frozen one, and none of recomputation or of experts that a token does not choose; `mfu` is
    its share of the device's measured rate (Chowdhery et al., 2022, arXiv 2204.02311).

    Args:
        model: megacompiled.

    Returns:
        Seconds, rates per second, and bytes of this rank: an object to `print()`. `to_dict()` is
        for a logger or a progress bar.

    Raises:
        ModelError: the model is not megacompiled.

    Example::

        for step, batch in enumerate(batches):
            train_step(model, optimizer, batch)
            if step % 10 == 0:
                print(megacompile.metrics(model))
    """
    streamed = streamed_model(model, "metrics")
    machine = streamed.machine
    if machine.meter is None:
        machine.meter = _meter(model, streamed)
    meter, steps = machine.meter, machine.meter.steps()
    total_s = sum(step.time_s for step in steps) or None
    tokens, samples = sum(step.tokens for step in steps), sum(step.samples for step in steps)
    tokens_s = tokens / total_s if total_s and tokens else None
    tflop_s = predicted_s = now = None
    if made := [each for each in streamed.captures.newest()[1] if each.backward is not None]:
        now = _scenario_of(streamed, made, meter)
        if tokens_s is not None:
            calls = sum(step.calls for step in steps)
            tflop_s = _flops_per_token(model, made, tokens // calls) * tokens_s / 1e12
        if now is not None and all(step.calls == 1 for step in steps):
            predicted_s = now.step_s
    return Metrics(
        steps=len(steps),
        step_s=total_s / len(steps) if total_s else None,
        predicted_s=predicted_s,
        tokens_s=tokens_s,
        samples_s=samples / total_s if total_s and samples else None,
        tflop_s=tflop_s,
        mfu=tflop_s / now.hardware.matmul_tflop_s if tflop_s and now else None,
        waits=meter.waits(),
        memory=meter.memory(machine.device),
    )


def _meter(model: nn.Module, streamed: StreamedModel) -> Meter:
    """A new meter of a model, which keeps no reference to it."""
    machine, model_ref = streamed.machine, ref(model)

    def traced() -> Trace | None:
        alive = model_ref()
        return None if alive is None or captured(machine.replays) else _trace([alive], patience_s=0)

    def held() -> dict[str, int]:
        found = {"host": machine.host_budget.held_bytes}
        return found if machine.disk is None else {**found, "disk": machine.disk.used_bytes}

    return Meter(type(model).__name__, traced, lambda: machine.code.found + machine.code.made, held)


def _scenario_of(
    streamed: StreamedModel, made: Sequence[Schedule], meter: Meter
) -> Scenario | None:
    """A step of these schedules on this machine, read and simulated once; None without rates."""
    kept: Scenario | None = meter.scenario
    if kept is None or list(map(id, kept.schedules)) != list(map(id, made)):
        compiler = streamed.buckets.plans.compiler
        rates = compiler.setting.measured_rates()
        kept = meter.scenario = None if rates is None else Scenario.of(compiler, made, rates)
    return kept


def _flops_per_token(model: nn.Module, made: Sequence[Schedule], tokens: int) -> float:
    """FLOPs of a forward and a backward for each of the `tokens` of a call."""
    params = list(model.parameters())
    total = sum(p.numel() for p in params)
    trained = sum(p.numel() for p in params if p.requires_grad)
    active = active_parameters(made, total, tokens)
    return (4 + 2 * trained / total) * active


def explain(
    model: nn.Module,
    *,
    trace: Trace | None = None,
    hardware: Hardware | None = None,
    changes: bool = True,
) -> Explanation:
    """Explain the step of a megacompiled model on one screen.

    Shows the stages; where every byte is, on the device and on the host; the plan and its reasons;
    how busy each stream is and what bounds the step; what would help, and by how much. Times are
    predicted for a step in the middle of training, for an AdamW with the states that the options
    name. A step adds up all captured graphs, those of other sizes and of evaluation too. A trace
    adds measured times. For the model's stages, and the process's updates in C++, `code` counts
    those from caches and those compiled in this process, and the seconds that took.

    If ranks share the model and have saved a trace, it names the one that the others waited for. No
    rank waits for another in this call, so a single rank may make it.

    Args:
        model: a model that has run a step; its newest schedules are explained.
        trace: a trace of whole steps of the model. Default: its last trace, if that still exists.
        hardware: the machine's rates. Default: on CUDA measured rates (once, in seconds); on the
            CPU saved rates, or those of an H200.
        changes: simulate other plans too. Each takes about as long as planning did.

    Returns:
        An object to `print()`. `to_dict()` is for programs; notebooks show it too.

    Raises:
        ModelError: the model is not megacompiled, or has not run.

    Example::

        with megacompile.trace(model):
            train_step(model, optimizer)
        print(megacompile.explain(model))
    """
    streamed = streamed_model(model, "explain")
    name = type(model).__name__
    planned, made = streamed.captures.newest()
    if not made:
        why = "it has not been called yet; call model(...), or a module in it, on a batch first"
        if streamed.called:
            why = "no captured code ran; a warning has the reason"
        raise ModelError(f"explain(): {name} has no schedule: {why}")
    options, compiler = streamed.options, streamed.buckets.plans.compiler
    machine = hardware or compiler.setting.rates()
    now = Scenario.of(compiler, made, machine)
    if trace is None and streamed in _TRACES:
        trace = _TRACES[streamed]()
    plans = options.plans and any(schedule.backward is not None for schedule in made)
    return Explanation.of(
        now,
        model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        traced=None if trace is None else trace.measured,
        changes=scenario.changes(now, compiler, planned) if changes and plans else (),
        rank_steps=() if trace is None else trace.rank_steps.get(name, ()),
        code={"stages": streamed.machine.code, "updates in C++": UPDATES},
    )


# The last trace of each model, as long as the user keeps it.
_TRACES: WeakKeyDictionary[StreamedModel, ref[Trace]] = WeakKeyDictionary()
