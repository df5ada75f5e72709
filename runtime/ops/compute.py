"""Implements the compute ops and the ops of optimizer updates."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from megacompile import log
from megacompile.errors import AnomalyError
from megacompile.ir.buckets import Bucket
from megacompile.ir.stages import ArgRef, Code, LoweredFn, ParamRef, SavedRef, Stage, Template
from megacompile.ir.stream import Stream
from megacompile.runtime.device.replay import Replay
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.machine import Group, OpGroup, handles
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.pending import InFlight
from megacompile.runtime.updates import on_device
from megacompile.runtime.updates.on_device import Sources, UpdateBuffers
from megacompile.runtime.updates.update import untimed, update_residents

Random = tuple[torch.Tensor, ...]
_VALUE, _EVENT = attrgetter("value"), attrgetter("event")  # of a handle


def random_state(device: torch.device) -> Random:
    """The random generators' state: the host's, and the device's if it has its own generator."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


def set_random_state(device: torch.device, state: Random) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def random_numbers_of(device: torch.device, state: Random) -> Iterator[None]:
    """Repeat the random draws from a recorded state."""
    now = random_state(device)
    set_random_state(device, state)
    try:
        yield
    finally:
        set_random_state(device, now)


class ComputeOps(OpGroup):
    """The ops of `megacompile.ir.ops.stage_ops` that compute."""

    def save_rng(self, stage: Stage) -> Handle:
        return self._issue(Stream.COMPUTE, (), lambda: random_state(self.machine.device))

    def snapshot(self, tensor: Handle) -> Handle:
        return self._issue(Stream.COMPUTE, (tensor,), lambda: tensor.value.clone())

    def assign(
        self, tensor: Handle, value: Handle, counted: bool = True, *, after: tuple[Any, ...] = ()
    ) -> Handle:
        def run() -> torch.Tensor:
            target: torch.Tensor = tensor.value
            (target if counted else target.data).copy_(value.value)
            return target

        self.machine.assigned += 1
        if after or self.recording is not None or not self.machine.streams.alone:
            return self._issue(Stream.COMPUTE, (tensor, value, after), run)
        self.to_write.append((tensor, value, counted))
        return tensor

    def forward(self, stage: Stage, weights: Any, args: Any, saving: bool) -> tuple[Handle, ...]:
        kind = Code.FORWARD_SAVING if saving else Code.FORWARD
        code = self._replayed(stage, kind) if self.captures else stage.traced.code[kind]
        count = stage.result_count

        def run() -> Sequence[Any]:
            results = code(_primals(stage, weights, args))
            return results if saving else results[:count]

        return self._issue_many((weights, args), run)

    def _replayed(self, stage: Stage, code: Code) -> LoweredFn:
        """The code of the only stage, replayed as a CUDA graph if the device can do that."""
        function = stage.traced.code[code]
        graphs = self.machine.graphs
        if graphs is None or self.recording is not None:
            return function
        if code not in self.replays:
            options = _replay_options(stage, code)
            self.replays[code] = Replay(graphs, self.machine.replays, 2 * self.captures, **options)
        return functools.partial(self.replays[code], function)

    def recompute(self, stage: Stage, weights: Any, args: Any, rng: Any) -> tuple[Handle, ...]:
        template, device = stage.traced, self.machine.device
        code = template.code[Code.RECOMPUTE]
        skip = stage.result_count if template.random else 0

        def run() -> Sequence[Any]:
            primals = _primals(stage, weights, args)
            with nullcontext() if rng is None else random_numbers_of(device, rng.value):
                return code(list(map(primals.__getitem__, template.recompute_primals)))[skip:]

        return self._issue_many((weights, args), run)

    def rerun(self, stage: Stage, weights: Any, args: Any, rng: Any) -> tuple[Handle, ...]:
        code, device = stage.traced.code[Code.FORWARD], self.machine.device
        count = len(stage.outputs)

        def run() -> Sequence[Any]:
            with nullcontext() if rng is None else random_numbers_of(device, rng.value):
                return code(_primals(stage, weights, args))[:count]

        return self._issue_many((weights, args), run)

    def backward(
        self,
        stage: Stage,
        weights: Any,
        args: Any,
        saved: Any,
        tangents: Any,
        partial_gradients: Any,
        live: Any = (),
    ) -> tuple[Handle, ...]:
        template = stage.traced
        of_args = stage.partial_args

        def run() -> Sequence[Any]:
            groups: dict[int, Group] = dict(map(_VALUE, partial_gradients[of_args:]))
            primals = _primals(stage, weights, args)
            inputs = [
                saved[item.index].value if isinstance(item, SavedRef) else primals[item]
                for item in template.backward_inputs
            ]
            flows = list(map(_VALUE, tangents))
            flowing = iter(partial_gradients[:of_args])
            for i in template.partial_gradients:
                ref = stage.primals[i]
                if isinstance(ref, ArgRef):
                    flows.append(next(flowing).value)
                else:
                    flows.append(groups[stage.buckets[ref.bucket].key][ref.param])
            inputs += _conformed(template, primals, flows)
            inputs += map(_VALUE, live)
            looks = self.machine.detect_anomaly or (
                torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
            )
            kind = Code.BACKWARD
            code = self._replayed(stage, kind) if self.captures else template.code[kind]
            found = code(inputs)
            if looks:
                _check_finite(stage, found, inf=self.machine.detect_anomaly)
            return self._sort(stage, found, groups)

        return self._issue_many((weights, args, saved, tangents, partial_gradients, live), run)

    @staticmethod
    def _sort(stage: Stage, found: Sequence[Any], groups: dict[int, Group]) -> list[Any]:
        """Gradients of args; per bucket (key, {parameter: gradient}); tensors that it writes."""
        of_args: list[Any] = []
        merged = {bucket.key: dict(groups.get(bucket.key, {})) for bucket in stage.gradient_buckets}
        for place, gradient in zip(stage.gradient_places, found, strict=False):
            if place is None:
                of_args.append(gradient)
            else:
                # a new tensor object: it may be a tangent or another gradient (see `keep_grad`),
                # and a view keeps its base alive
                merged[place[0]][place[1]] = gradient.detach()
        return [*of_args, *merged.items(), *found[len(stage.gradient_places) :]]


def _replay_options(stage: Stage, code: Code) -> dict[str, Any]:
    """Options of a `Replay`. Parameters and a captured forward's saved tensors stay in place."""
    params = {i for i, ref in enumerate(stage.primals) if isinstance(ref, ParamRef)}
    if code is not Code.BACKWARD:
        outputs = range(len(stage.outputs))
        return {"in_place": params, "given_away": outputs, "leaves": code is Code.FORWARD_SAVING}
    inputs = enumerate(stage.traced.backward_inputs)
    in_place = [k for k, item in inputs if isinstance(item, SavedRef) or item in params]
    away = [k for k, place in enumerate(stage.gradient_places) if place is None]
    return {"in_place": in_place, "given_away": away, "leaves": False}


def _check_finite(
    stage: Stage,
    found: Sequence[torch.Tensor | None],  # gradients, in the order of template.gradients
    *,
    inf: bool,
) -> None:
    """Raise an AnomalyError for NaN and, with `detect_anomaly=True`, inf in the gradients of a
    stage. Under `torch.autograd.detect_anomaly()` only NaN is an error, as in torch: a
    GradScaler expects occasional infs. The check reads values: the host waits for the device
    after each stage."""
    names = []
    for i, x in zip(stage.traced.gradients, found, strict=False):
        if x is None or not (x.is_floating_point() or x.is_complex()):
            continue
        if x.isnan().any() or (inf and x.isinf().any()):
            ref = stage.primals[i]
            if isinstance(ref, ArgRef):
                names.append(f"input {ref.index} of shape {stage.metas[i].shape}")
            else:
                names.append(f"parameter {stage.buckets[ref.bucket].params[ref.param].name!r}")
    if names:
        raise AnomalyError(
            f"backward of stage {stage.name!r} ({stage.index}B): {'NaN or inf' if inf else 'NaN'} "
            f"in the gradient of {', '.join(names)}; no later stage has it, so it arises in this "
            "one, in its forward, or in the code after the model; leave out detect_anomaly to "
            "continue regardless"
        )


def _conformed(
    template: Template, primals: Sequence[Any], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The user's gradients, whose dtypes autograd has checked, in the strides that the backward was
    traced with."""
    strides = None  # None: those of the metas
    if template.tangent_strides is not None:
        strides = template.tangent_strides(*(primals[i] for i in template.numbers))
    found = []
    for k, (gradient, meta) in enumerate(zip(gradients, template.tangent_metas, strict=False)):
        stride = meta.stride if strides is None else strides[k]
        if gradient.stride() == stride:
            found.append(gradient)
            continue
        made = torch.empty_strided(gradient.shape, stride, dtype=meta.dtype, device=meta.device)
        found.append(made.copy_(gradient))
    return found


def _primals(stage: Stage, weights: Any, args: Any) -> list[Any]:
    """The stage's inputs in order; None for inputs not passed to the op."""
    found: list[Any] = []
    for ref in stage.primals:
        if isinstance(ref, ParamRef):
            handle = weights[ref.bucket]
            value = None if handle is None else handle.value[ref.param]
        else:
            handle = args[ref.index]
            value = None if handle is None else handle.value
        found.append(value)
    return found


class UpdateOps(OpGroup):
    """The ops of optimizer updates, on the host and on the device."""

    def update_host(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.HOST)
        events = list(filter(None, map(_EVENT, handles(after))))
        staging, updates = self.machine.staging, self.machine.host_updates
        if staging is None:
            made = updates.start(part, events, self.recording)
            return Handle(made, Stream.HOST, host=part.bucket.pending)
        host = part.bucket
        states, weights = staging.states.of(host), staging.updates.of(host)

        def written(made: InFlight) -> InFlight:
            work = made
            for lease, params, kind in (weights, part.indices, "WEIGHTS"), (states, None, "STATE"):
                if lease is not None:
                    what = f"{bucket.label}WRITE_{kind} of {host.layout.name!r}"
                    work = staging.write(lease, params, what, work, made.wait)
            return work

        staged = [each for each in (states, weights) if each is not None]
        made = updates.start(part, events, self.recording, written, staged)
        return Handle(made, Stream.HOST, host=host.pending)

    def update_resident(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        """Collect the update of a resident bucket; the last such op of a graph runs all of them in
        one launch. No op in between reads these buckets, and later ones are on the same stream."""
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.COMPUTE)
        self.residents.append((part, after))
        if len(self.residents) < self.resident_parts:
            return Handle(None, Stream.COMPUTE)
        parts, waits = zip(*self.residents, strict=True)
        self.residents = []
        handle = self._issue(Stream.COMPUTE, waits, lambda: update_residents(parts))
        for part in parts:
            part.bucket.note_changes(part.indices)
        return handle

    def update_in_place(
        self,
        bucket: Bucket,
        gradients: Handle,
        norms: Handle | None = None,
        *,
        after: tuple[Any, ...] = (),
    ) -> Handle:
        machine, updates = self.machine, self._in_backward
        host, run = machine.buckets[bucket.key], machine.run

        def step() -> None:
            _, group = gradients.value
            if norms is not None:
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.keep(norms.value, norms.event)
            updates.update_in_place(host, group)

        return self._issue(Stream.COMPUTE, (gradients, norms, after), step)

    def help_host(self, updates: tuple[Handle, ...]) -> Handle:
        made = {h.value.future for h in updates if isinstance(h.value, InFlight) and h.value.future}
        self.machine.host_updates.help(made)
        log.logger("update").debug("the device helps with %d updates", len(made))
        return Handle(None, Stream.DEVICE)

    def alloc_state(self, bucket: Bucket, masters: bool) -> Handle:
        host, device = self.machine.buckets[bucket.key], self.machine.device
        return self._issue(
            Stream.COMPUTE,
            (),
            lambda: on_device.make_buffers(host, self._sources(host), device, masters=masters),
        )

    def fetch_state(
        self, bucket: Bucket, buffer: Handle, masters: bool, *, after: tuple[Any, ...] = ()
    ) -> Handle:
        host = self.machine.buckets[bucket.key]

        def fetch() -> UpdateBuffers:
            buffers: UpdateBuffers = buffer.value
            on_device.fetch(host, buffers, self._sources(host), masters=masters)
            return buffers

        return self._issue(Stream.H2D, (buffer, after), fetch)

    def _sources(self, host: HostBucket) -> Sources:
        """The states on the host for a device update; empty if they are unknown."""
        source = self.machine.in_backward or self.machine.device_update
        return source.sources(host, self.gradient_params[host.layout.key])

    def update(
        self, bucket: Bucket, weights: Handle | None, gradients: Handle, state: Handle
    ) -> Handle:
        host = self.machine.buckets[bucket.key]
        if self.in_step:
            part = self.parts.get(bucket.key)
            if part is None:  # this step does not update it
                return Handle(None, Stream.COMPUTE)
            steps = {step.index: step for step in part.steps}
        else:
            steps = self._in_backward.running[bucket.key]

        def step() -> UpdateBuffers:
            _, group = gradients.value
            given = None if weights is None else weights.value
            if given is not None and self.machine.ranks is not None:
                given = self.machine.ranks.own(bucket, given)
            buffers: UpdateBuffers = state.value
            with torch.no_grad():
                on_device.update(host, buffers, steps, group, given)
            return buffers

        return self._issue(Stream.COMPUTE, (weights, gradients, state), step)

    def offload_state(self, bucket: Bucket, updated: Handle, norms: Handle | None = None) -> Handle:
        if self.in_step:
            return self._bring_back(bucket, updated)
        host, run = self.machine.buckets[bucket.key], self.machine.run
        queue = self.machine.streams.copies(Stream.D2H)

        def copy() -> InFlight | None:
            if norms is not None:  # first, so that a loop that logs them waits only for them
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.fill(norms.value, queue)
            return self._in_backward.offload(host, updated.value, queue)

        return self._issue(Stream.D2H, (updated, norms), copy)

    def _bring_back(self, bucket: Bucket, updated: Handle) -> Handle:
        """Start a thread's copy to the host: see [Note: small chunks] in `updates.on_device`."""
        machine, part = self.machine, self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.HOST)
        assert part.left is not None
        left = part.left
        timed = untimed if self.recording is None else self.recording.in_background()
        flying = left.bring_back(updated.event, machine.copies, timed)
        part.left = None
        if flying is None:
            return Handle(None, Stream.HOST)
        machine.device_update.flying.append(left.host)
        return Handle(flying, Stream.HOST, host=left.host.pending)
