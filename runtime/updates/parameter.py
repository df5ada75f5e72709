"""The update of parameters: their tensors in place and on a device, and torch.optim's own step.

Both device updates use the device buffers: in the backward (`in_backward`), and in
`optimizer.step()` from tensors that the backward left on the device (`on_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.device.background import Completion, fulfil
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, map_state
from megacompile.runtime.optim.twin import update_bucket
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.work import InFlight

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (device, host), both flat
Place = Callable[[torch.Tensor], torch.Tensor]  # disk tensor -> its in-memory copy
Sources = Mapping[int, tuple[State | None, ...]]  # parameter index -> its states on the host


@dataclass(eq=False, slots=True)
class ParamUpdate:
    """The update of one parameter, recorded when `optimizer.step()` is called."""

    index: int  # in its bucket
    grad: torch.Tensor
    scale: float  # of the gradient
    group: dict[str, Any]  # the parameter group's options at that time, for torch.optim's own step
    states: dict[str, Any]  # name -> tensor, or (codes, absmax)
    rule: OptimizerRule | None = None
    hyper: Sequence[float] = ()
    seed: int | None = None
    intact: bool = False  # the gradient is unchanged since the backward, except for the scale
    factor: torch.Tensor | None = None  # 0-d, another factor of the gradient of a RESIDENT bucket

    def in_order(self) -> tuple[State | None, ...]:
        """The states in the rule's order."""
        assert self.rule is not None
        return tuple(self.states.get(moment.name) for moment in self.rule.moments)


def run_stock(
    kind: type[Optimizer], steps: Sequence[ParamUpdate], params: dict[int, torch.Tensor]
) -> None:
    """One step of an optimizer of `kind` on `params`; new states are stored in `step.states`."""
    groups = []
    for step in steps:
        param = params[step.index]
        grad = step.grad.to(param.dtype)
        param.grad = grad if step.scale == 1.0 else grad * step.scale
        groups.append({**step.group, "params": [param]})
    make: Any = kind
    shadow = make(groups)
    for step in steps:
        if step.states:
            shadow.state[params[step.index]].update(step.states)
    compat.step_without_hooks(shadow)
    for step in steps:
        params[step.index].grad = None
        step.states.update(shadow.state[params[step.index]])


def run_stock_on_device(
    kind: type[Optimizer],
    step: ParamUpdate,
    param: torch.Tensor,  # on the host
    device: torch.device,
) -> None:
    """One step of an optimizer of `kind` on copies of a parameter and its states on a device."""

    def moved(name: str, value: Any) -> Any:
        if name == "step" or not isinstance(value, torch.Tensor):
            return value
        return value.to(device, non_blocking=True)

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        on_device = moved("", param)
        states = {name: moved(name, value) for name, value in step.states.items()}
        copy = replace(step, grad=moved("", step.grad), states=states)
        run_stock(kind, [copy], {step.index: on_device})
        param.copy_(on_device, non_blocking=True)
        for name, value in copy.states.items():
            on_host = step.states.get(name)
            if isinstance(on_host, torch.Tensor):
                on_host.copy_(value, non_blocking=True)
            else:  # created by the first step
                step.states[name] = value.cpu() if isinstance(value, torch.Tensor) else value
        if stream is not None:
            stream.synchronize()


def update_of(
    host: HostBucket,
    step: ParamUpdate,
    gradient: torch.Tensor,
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> Update:
    """The update of a parameter in its place, by rule, with `lay` applied to its tensors."""
    value = host.values[step.index]
    return Update(
        param=lay(value),
        grad=lay(laid_out_as(gradient, value)),
        states=tuple([lay(s) if isinstance(s, torch.Tensor) else s for s in step.in_order()]),
        hyper=step.hyper,
        copy=lay(host.streamed[step.index]) if host.has_copy else None,
        seed=step.seed,
        factor=step.factor,
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order: (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of another tensor of the same shape."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


# The parameters and optimizer states of a bucket that the device updates.


@dataclass(slots=True)
class UpdateBuffer:
    """One parameter's new value and states on the device, flat."""

    new: torch.Tensor | None
    """(numel,) in the host parameter's dtype; None: the update reads the streamed weights and
    allocates it."""
    copy: torch.Tensor | None  # (numel,) in the streamed dtype, if different
    states: tuple[State | None, ...]  # in the rule's order

    @property
    def value(self) -> torch.Tensor:
        """The parameter on the device, once it exists."""
        assert self.new is not None
        return self.new

    @property
    def streamed(self) -> torch.Tensor:
        """The parameters for the next forward: (numel,) in the streamed dtype."""
        return self.value if self.copy is None else self.copy


UpdateBuffers = dict[int, UpdateBuffer]  # by parameter index in the bucket


@dataclass(frozen=True, slots=True, eq=False)
class WriteBack:
    """New parameters and states of a bucket in flight to the host."""

    host: HostBucket
    work: InFlight

    def stays(self, buffers: UpdateBuffers) -> None:
        """Offer the buffers to the next forward in `work.fresh`, unless an alias may be written
        later."""
        if not any(map(self.host.aliased, buffers)):
            self.work.fresh.update({i: buffer.streamed for i, buffer in buffers.items()})


def make_buffers(
    host: HostBucket, sources: Sources, device: torch.device, *, masters: bool
) -> UpdateBuffers:
    """Allocate device memory for states like `sources`, and with `masters` for the parameters.

    The dtype of the host's parameters (masters) may differ from that of the streamed ones.
    """

    def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=dtype or tensor.dtype, device=device)

    buffers: UpdateBuffers = {}
    for i, states in sources.items():
        value, streamed = host.values[i], host.layout.params[i].dtype
        buffers[i] = UpdateBuffer(
            new=like(value) if masters else None,
            copy=like(value, streamed) if masters and value.dtype != streamed else None,
            states=tuple(map_state(like, state) for state in states),
        )
    return buffers


def fetch(host: HostBucket, buffers: UpdateBuffers, sources: Sources, *, masters: bool) -> None:
    """Copy states, and with `masters` the parameters, to the device; nothing that is unknown."""
    for i in sources.keys() & buffers.keys():
        if masters:
            buffers[i].value.copy_(flat(host.values[i]), non_blocking=True)
        for on_device, on_host in _pairs(buffers[i], sources[i]):
            on_device.copy_(on_host, non_blocking=True)


def update(
    host: HostBucket,
    buffers: UpdateBuffers,
    steps: Mapping[int, ParamUpdate],
    gradients: Mapping[int, torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
) -> None:
    """Run the step in place in the buffers. If the buffers have no parameters, it reads `weights`
    and allocates the new parameters here, as late as possible."""
    rule: OptimizerRule | None = None  # one optimizer's
    updates: list[Update] = []
    for i, buffer in buffers.items():
        step = steps[i]
        rule = step.rule
        like = host.values[i] if weights is None else weights[i]
        if buffer.new is None:
            assert weights is not None
            buffer.new = torch.empty_like(flat(like))
        updates.append(
            Update(
                param=buffer.value if weights is None else flat(weights[i]),
                grad=flat(laid_out_as(gradients[i], like)),
                states=buffer.states,
                hyper=step.hyper,
                out=None if weights is None else buffer.new,
                copy=buffer.copy,
                seed=step.seed,
            )
        )
    if rule is not None:
        update_bucket(rule, [u for u in updates if u.param.numel()])


def write_back(
    host: HostBucket,
    buffers: UpdateBuffers,
    sources: Sources,
    visible: Sequence[torch.Tensor],
    queue: torch.cuda.Stream | None,
    place: Place | None = None,
) -> WriteBack | None:
    """Copy new parameters and states to the host; parameters first, because they are needed next.

    Args:
        visible: the user-visible states, guarded until the copies are done.
        queue: the copy stream; None on the CPU, where the copies are synchronous.
        place: returns the destination of parameters on a disk.
    """
    write = None
    try:
        for on_device, on_host in params_back(host, buffers, place):
            on_host.copy_(on_device, non_blocking=True)
        params = None if queue is None else queue.record_event()
        for on_device, on_host in states_back(buffers, sources):
            on_host.copy_(on_device, non_blocking=True)
        if queue is not None and params is not None:
            copied = InFlight(queue.record_event(), weights=Completion(params))
            write = WriteBack(host, copied)
            host.pending.wait()  # earlier work in flight
            host.pending.start(write.work, list(buffers), visible)
    except BaseException:  # Ctrl-C: copies in flight are not recorded
        if queue is not None:
            queue.synchronize()
        raise
    host.note_changes(buffers)
    return write


def params_back(host: HostBucket, buffers: UpdateBuffers, place: Place | None = None) -> Pairs:
    """New parameters on the device and their destinations."""
    for i, buffer in buffers.items():
        yield buffer.value, flat(host.values[i] if place is None else place(host.values[i]))
        if host.has_copy:
            yield buffer.streamed, flat(host.streamed[i])


def states_back(buffers: UpdateBuffers, sources: Sources) -> Pairs:
    """New states on the device and their destinations."""
    for i, buffer in buffers.items():
        yield from _pairs(buffer, sources[i])


def _pairs(buffer: UpdateBuffer, states: Sequence[State | None]) -> Pairs:
    """A parameter's states on the device and on the host."""
    for on_device, on_host in zip(buffer.states, states, strict=True):
        yield from zip(_parts(on_device), _parts(on_host), strict=True)


def _parts(state: State | None) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a state."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (flat(state),)


# Work on threads after `optimizer.step()` has returned: host updates, and copies of device results
# to the host.

Timed = Callable[[str, Callable[[], None]], None]  # (lane, work): runs work and records its times


def untimed(lane: str, work: Callable[[], None]) -> None:
    """Run work without recording its times."""
    del lane
    work()


def fulfil_update(future: Future[None], name: str, work: Callable[[], None]) -> None:
    """Run `work`, which updates the bucket `name` or copies its new values to the host.

    The future's error is an `OptimizerError`.
    """

    def update() -> None:
        try:
            work()
        except BaseException as error:
            raise OptimizerError(
                f"optimizer.step(): the update of {name!r} failed in the background with "
                f"{type(error).__name__}: {error}; its parameters and states are half updated: "
                "load a checkpoint"
            ) from error

    fulfil(future, update)
