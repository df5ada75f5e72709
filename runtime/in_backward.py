"""The optimizer's update inside of the backward: `megacompile(model, optimizer=...)`.

Behind the backward of each stage the bucket's optimizer states are on the device; the update takes
the gradients there, so these never reach the host. `optimizer.step()` only commits: it counts the
step. The hyperparameters are those of the optimizer when `backward()` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.guards import guard, guard_of
from megacompile.runtime.host import HostBucket
from megacompile.runtime.kernels.bucket import update_bucket
from megacompile.runtime.rules import Rule, State, Update
from megacompile.runtime.update import STATES, Step, flat, laid_out_as

Place = tuple[int, int]


@dataclass(slots=True)
class Room:
    """One parameter's new value and states on the device, flat."""

    new: torch.Tensor  # (numel,) of the parameter's dtype on the host
    copy: torch.Tensor | None  # (numel,) of the streamed dtype, where that is another
    states: tuple[State | None, ...]


Rooms = dict[int, Room]  # by the parameter's index in its bucket


@dataclass(frozen=True, slots=True)
class Landing:
    """New parameters and states on their way to the host: an `InFlight`."""

    params: torch.cuda.Event
    states: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.states.query())

    def wait(self) -> None:
        self.states.synchronize()


class Consumed:
    """Guards a `p.grad` that is gone: the backward has made an update of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, tensor: torch.Tensor) -> None:
        del tensor
        raise OptimizerError(
            f"p.grad of {self.name!r} is not there: megacompile(model, optimizer=...) updates in "
            "the backward, and gradients never leave the device, so they cannot be read, clipped "
            "by their global norm or unscaled by a GradScaler; for those leave out optimizer=, or "
            "use megacompile.accumulate(model) around the backward, and clip micro-batches"
        )

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`zero_grad(set_to_none=False)` has nothing to do."""
        del kwargs
        if function in (torch.Tensor.zero_, torch.Tensor.detach_):
            return args[0]
        return None if function is compat.FOREACH_ZERO else NotImplemented


def consumed(gradient: torch.Tensor | None) -> bool:
    """Has an update in the backward taken it?"""
    return gradient is not None and isinstance(guard_of(gradient), Consumed)


def consume(param: nn.Parameter, name: str) -> None:
    """Let `p.grad` say that it is gone; it takes no memory."""
    dtype = param.grad_dtype or param.dtype
    gradient = torch.zeros((), dtype=dtype).expand(param.shape)
    guard(gradient, Consumed(name))
    param.grad = gradient


class InBackward:
    """Carries the `*_state` and `update` ops out.

    Args:
        optimizer: whose step it is.
        steps: prepares the steps of some of a bucket's parameters (`Updates.prepare`).
    """

    def __init__(self, optimizer: Optimizer, steps: Any) -> None:
        self.optimizer = optimizer
        self.prepare = steps
        self.accumulating = False  # inside of megacompile.accumulate()
        self.uncommitted: set[Place] = set()  # updated, and step() was not called yet
        self.running: dict[int, dict[int, Step]] = {}  # the steps of the backward that runs now
        self._options: list[dict[str, Any]] = []  # of the groups, when it began
        self._parked: list[tuple[Any, torch.cuda.Event]] = []

    def begin(self, buckets: Mapping[int, HostBucket], wanted: Mapping[int, Sequence[int]]) -> None:
        """Take the hyperparameters for the backward of one schedule."""
        places = {(key, i) for key, params in wanted.items() for i in params}
        again = sorted(places & self.uncommitted)
        if again:
            key, i = again[0]
            raise OptimizerError(
                f"parameter {buckets[key].layout.params[i].name!r} was updated in a backward "
                "already, and gets another gradient before optimizer.step(): call step() after "
                "each backward, put all micro-batches but the last into "
                "`with megacompile.accumulate(model):`, or, where a graph break lets two captured "
                "graphs use one parameter, leave out optimizer="
            )
        if not self.uncommitted:
            self._options = [_options(group) for group in self.optimizer.param_groups]
        for key, params in wanted.items():
            buckets[key].settle()
            self.running[key] = self.prepare(self.optimizer, buckets[key], params)
        self.uncommitted |= places

    def commit(self) -> list[Place]:
        """`optimizer.step()` was called; gives the parameters whose step it is."""
        now = [_options(group) for group in self.optimizer.param_groups]
        if self.uncommitted and now != self._options:
            raise OptimizerError(
                "optimizer.step(): a parameter group was changed between backward() and step() "
                f"({_difference(self._options, now)}), but the update has been made in the "
                "backward; change it after step(), as lr schedulers do"
            )
        done, self.uncommitted = sorted(self.uncommitted), set()
        return done

    # The ops.

    def alloc(self, host: HostBucket, device: torch.device, *, masters: bool) -> Rooms:
        """Memory on the device for the states of the parameters that are updated."""
        rooms: Rooms = {}
        for i, step in self.running[host.layout.key].items():
            value, streamed = host.values[i], host.layout.params[i].dtype
            numel = value.numel()
            cast = masters and value.dtype != streamed

            def empty(
                dtype: torch.dtype, count: int = numel, device: torch.device = device
            ) -> torch.Tensor:
                return torch.empty(count, dtype=dtype, device=device)

            rooms[i] = Room(
                new=empty(value.dtype),
                copy=empty(streamed) if cast else None,
                states=tuple(_room_like(step.states.get(name), empty) for name in _names(step)),
            )
        return rooms

    def fetch(self, host: HostBucket, rooms: Rooms, *, masters: bool) -> Rooms:
        """States, and masters, to the device."""
        for i, room in rooms.items():
            if masters:
                room.new.copy_(flat(host.values[i]), non_blocking=True)
            for target, source in self._pairs(host, i, room):
                target.copy_(source, non_blocking=True)
        return rooms

    def update(
        self, host: HostBucket, weights: Sequence[torch.Tensor] | None, gradients: Any, rooms: Rooms
    ) -> Rooms:
        """The step: what was fetched is new afterwards."""
        updates: dict[Rule, list[Update]] = {}
        for i, room in rooms.items():
            step = self.running[host.layout.key][i]
            assert step.rule is not None
            like = host.values[i] if weights is None else weights[i]
            gradient = flat(laid_out_as(gradients[i], like))
            updates.setdefault(step.rule, []).append(
                Update(
                    param=room.new if weights is None else flat(weights[i]),
                    grad=gradient,
                    states=room.states,
                    hyper=step.hyper,
                    out=None if weights is None else room.new,
                    copy=room.copy,
                    seed=step.seed,
                )
            )
        for rule, of_rule in updates.items():
            update_bucket(rule, [u for u in of_rule if u.param.numel()])
        return rooms

    def offload(self, host: HostBucket, rooms: Rooms, queue: torch.cuda.Stream | None) -> None:
        """New parameters and states to the host; the parameters first, which are wanted next."""
        for i, room in rooms.items():
            flat(host.values[i]).copy_(room.new, non_blocking=True)
            if host.has_copy:
                copy = room.new if room.copy is None else room.copy
                flat(host.streamed[i]).copy_(copy, non_blocking=True)
        params = None if queue is None else queue.record_event()
        for i, room in rooms.items():
            for source, target in self._pairs(host, i, room):
                target.copy_(source, non_blocking=True)
        if queue is not None and params is not None:
            landing = Landing(params, queue.record_event())
            host.land(landing, list(rooms), self._visible(host, rooms))
        for i in rooms:
            torch.autograd.graph.increment_version(host.params[i])
            host.mark_fresh(i)

    def _pairs(
        self, host: HostBucket, i: int, room: Room
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A parameter's states on the device and on the host, flat."""
        step = self.running[host.layout.key][i]
        for name, there in zip(_names(step), room.states, strict=True):
            yield from zip(_parts(there), _parts(step.states.get(name)), strict=True)

    def _visible(self, host: HostBucket, rooms: Iterable[int]) -> list[torch.Tensor]:
        """The states that the user can see."""
        states = (self.optimizer.state[host.params[i]] for i in rooms)
        return [v for s in states for k, v in s.items() if k != "step" and type(v) is torch.Tensor]

    def park(self, value: Any, events: Iterable[torch.cuda.Event]) -> None:
        """Keep device memory until copies out of it are done."""
        self._parked = [entry for entry in self._parked if not entry[1].query()]
        self._parked += [(value, event) for event in events]


def _names(step: Step) -> tuple[str, ...]:
    assert step.rule is not None
    return STATES[step.rule]


def _parts(state: State | None) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a state."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (flat(state),)


def _room_like(state: State | None, empty: Any) -> State | None:
    if isinstance(state, tuple):
        codes, absmax = state
        return empty(codes.dtype, codes.numel()), empty(absmax.dtype, absmax.numel())
    return None if state is None else empty(state.dtype)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are now, comparable."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key != "params"
    }


def _difference(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    found = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for old, new in zip(before, now, strict=False)
        for key in new
        if old.get(key) != new.get(key)
    ]
    return ", ".join(found) or "groups were added"
