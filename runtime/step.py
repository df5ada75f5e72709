"""`optimizer.step()` of a stock optimizer over streamed parameters.

Hooks on the optimizer do the update of our parameters before its own step, with its own
`param_groups` and `state`, and hide their gradients from it until it is done. `step()` returns at
once: one thread updates bucket after bucket, in the order in which the next forward reads them,
and a prefetch waits for its bucket alone. Whoever looks at a parameter, a gradient or a state
before its bucket is done waits for that bucket (see `guards`).

The states lie in flat host buckets; `optimizer.state[p]` has views of them under the stock names.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat, log
from megacompile.options import Lowering, Options
from megacompile.runtime.blockwise import quantizes
from megacompile.runtime.executor import Machine
from megacompile.runtime.flight import Flight
from megacompile.runtime.guards import guard_of, unguarded
from megacompile.runtime.handed import Handed
from megacompile.runtime.host import HostBucket, Offer
from megacompile.runtime.rooms import note_changes
from megacompile.runtime.rules import Rule, adam_hyper, seed_of, sgd_hyper
from megacompile.runtime.served import served
from megacompile.runtime.states import BlockwiseTensor, is_shared, to_plain
from megacompile.runtime.update import BucketUpdate, Step, Way

_BY_RULE = (AdamW, Adam, SGD)
_ON_DEVICE = (Muon, Adafactor)
_RULES = (Way.COMPILED, Way.TORCH, Way.BACKWARD, Way.RESIDENT)


class Updates:
    """The optimizer steps of one model's parameters."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self.machine = machine
        self.options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megacompile-update")
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="megacompile-offload")
        self._said: set[str] = set()
        self.ways: dict[str, Way] = {}  # by the bucket's name, of the last step
        _LIVE.add(self)
        if options.state_dtype is not None:
            reference = weakref.ref(self)

            def ours(param: torch.Tensor) -> bool:
                updates = reference()
                return updates is not None and updates.owns(param)

            compat.keep_state_dtypes(ours)

    def owns(self, param: torch.Tensor) -> bool:
        """Is it a parameter of this model?"""
        return self.machine.gradients.place(param) is not None

    def settle(self) -> None:
        """Wait for everything that is in flight; raise what failed."""
        for bucket in self.machine.buckets.values():
            bucket.settle()

    def step(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Start the update of our parameters; gives those that are done, and their gradients."""
        if any(self.owns(param) for group in optimizer.param_groups for param in group["params"]):
            self.machine.before_step()  # it may move buckets, and their gradients
            self._take_over()
        found = [
            (group, param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and self.owns(param) and not self._left_to(optimizer, param)
        ]
        if not found:
            return []
        found = self._commit(optimizer, found)
        if not found:
            return []
        self.settle()
        why = self._stands_back(optimizer, found)
        if why:
            self._say(f"{type(optimizer).__name__} keeps torch.optim's path on the host: {why}")
            return []
        updates: dict[int, BucketUpdate] = {}
        held: dict[int, list[torch.Tensor]] = {}  # what the user can see of a bucket's update
        states: dict[int, list[torch.Tensor]] = {}  # the states among it
        offers: dict[int, Offer | None] = {}
        aliased: set[int] = set()
        by_bucket: dict[int, list[tuple[dict[str, Any], nn.Parameter]]] = {}
        for group, param in found:
            by_bucket.setdefault(self._place(param)[0], []).append((group, param))
        for key in self._in_order(by_bucket):
            bucket = self.machine.buckets[key]
            pairs = by_bucket[key]
            update = self._update(optimizer, bucket, pairs)
            updates[key], held[key], states[key] = update, [], []
            offers[key] = bucket.take_offer()
            for (_, param), step in zip(pairs, update.steps, strict=True):
                mine = self._visible(optimizer.state[param])
                held[key] += mine
                states[key] += mine
                assert param.grad is not None
                if guard_of(param.grad) is None:
                    held[key].append(param.grad)
                if bucket.aliased(step.index) or any(map(is_shared, mine)):
                    aliased.add(key)
                if update.way is Way.STOCK and _has_tensors(step.group):
                    aliased.add(key)  # see float64 in _step
        done = [(param, param.grad) for _, param in found]
        first = {key: update.new() for key, update in updates.items() if update.makes_states()}
        handed = {
            key: self._handed(update, offers[key], key in aliased)
            for key, update in updates.items()
        }
        compiled: set[object] = set()
        for update in updates.values():
            update.prepare(compiled)
        for key, update in updates.items():
            if update.way is Way.RESIDENT:
                update()
                note_changes(update.bucket, [step.index for step in update.steps])
            elif handed[key] is None:
                self._start(update, held[key])
            log.logger("update").info("%s: %s", update.bucket.layout.name, update.way.value)
        for key, update in updates.items():
            if (given := handed[key]) is not None:
                given.step(update.bucket, update.steps, self._copies)
        for key, update in updates.items():
            if update.way in (Way.COMPILED, Way.TORCH, Way.HANDED):
                self.machine.hand_over.learn(key, update.steps, states[key])
        for key in first.keys() | aliased:
            updates[key].bucket.settle()
        for key, steps in first.items():
            self._install(optimizer, updates[key].bucket, steps)
        for _, trained in found:
            _drop_empty(optimizer, trained)
        return done  # type: ignore[return-value]

    def _take_over(self) -> None:
        """Adopt data that the user has put into parameters (`p.data = ...`) since the forward."""
        for bucket in self.machine.buckets.values():
            if bucket.replaced():
                bucket.settle()
                bucket.withdraw()
                if not self.machine.exchanged():
                    bucket.adopt()

    def _left_to(self, optimizer: Optimizer, param: nn.Parameter) -> bool:
        """Does the optimizer's own step update a parameter: one on the device, or not in place?"""
        key, i = self._place(param)
        bucket = self.machine.buckets[key]
        if param.data_ptr() != bucket.values[i].data_ptr():
            return True
        eager = self.options.lowering is Lowering.EAGER
        left = bucket.resident is not None and (eager or type(optimizer) not in _BY_RULE)
        if left and param in optimizer.state:  # states that were loaded before the bucket moved
            state = optimizer.state[param]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                    state[name] = value.to(param.device)
        return left

    def _handed(self, update: BucketUpdate, offer: Offer | None, aliased: bool) -> Handed | None:
        """What the backward left on the device for an update, if that is still right."""
        assert offer is None or isinstance(offer, Handed)
        if offer is None:
            return None
        if aliased or update.way not in (Way.COMPILED, Way.TORCH) or not offer.fits(update.steps):
            offer.drop()
            return None
        update.way = self.ways[update.bucket.layout.name] = Way.HANDED
        return offer

    def _commit(
        self, optimizer: Optimizer, found: list[tuple[dict[str, Any], nn.Parameter]]
    ) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Count the steps that the backward made; gives those that are still to be made."""
        updates = self.machine.in_backward
        if updates is None or updates.optimizer is not optimizer:
            return found
        done = updates.commit()
        for key, i in done:
            param = self.machine.buckets[key].params[i]
            _count_up(optimizer.state[param])
            _drop_empty(optimizer, param)
            param.grad = None
        return [(group, param) for group, param in found if param.grad is not None]

    # What is asked for.

    def _stands_back(
        self, optimizer: Optimizer, found: Iterable[tuple[dict[str, Any], nn.Parameter]]
    ) -> str:
        """Why an optimizer's own step must do it; "" if we can."""
        if type(optimizer) not in (*_BY_RULE, *_ON_DEVICE):
            return "it has no update of ours (AdamW, Adam, SGD, Muon and Adafactor have)"
        if getattr(optimizer, "grad_scale", None) is not None or (
            getattr(optimizer, "found_inf", None) is not None
        ):
            return "a GradScaler hands its scale to the fused step"
        for group, param in found:
            assert param.grad is not None
            if group.get("differentiable") or group.get("capturable"):
                return "it is differentiable or capturable"
            if param.is_complex():
                return "a parameter is complex"
            if param.grad.layout is not torch.strided:
                return "a gradient is sparse"
        return ""

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"megacompile: {text} (said once)", stacklevel=6)

    def _place(self, param: torch.Tensor) -> tuple[int, int]:
        place = self.machine.gradients.place(param)
        assert place is not None
        return place

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        """Buckets in the order in which the forward read them."""
        rank = {key: i for i, key in enumerate(self.machine.order)}
        return sorted(keys, key=lambda key: (rank.get(key, len(rank)), key))

    # The update of a bucket.

    def prepare(
        self, optimizer: Optimizer, bucket: HostBucket, indices: Iterable[int]
    ) -> dict[int, Step]:
        """The steps of some parameters by rule, for an update in the backward."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        pairs = [(groups[id(bucket.params[i])], bucket.params[i]) for i in indices]
        self._make_rooms(optimizer, bucket, pairs, by_rule=True, pin=self._cuda)
        self.ways[bucket.layout.name] = Way.BACKWARD
        none = torch.empty(0)
        steps = [self._step(optimizer, bucket, g, p, none, 1.0, Way.BACKWARD) for g, p in pairs]
        return {step.index: step for step in steps}

    def _update(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        pairs: list[tuple[dict[str, Any], nn.Parameter]],
    ) -> BucketUpdate:
        way = self._way(optimizer, bucket, pairs)
        update = BucketUpdate(bucket, way, type(optimizer), self.machine.device)
        self.ways[bucket.layout.name] = way
        pin = way is Way.DEVICE or self.machine.in_backward is not None
        pin = pin or bucket.layout.key in self.machine.hand_over.keys
        self._make_rooms(optimizer, bucket, pairs, by_rule=way in _RULES, pin=pin and self._cuda)
        for group, param in pairs:
            gradient = param.grad
            assert gradient is not None
            who = served(gradient)
            if who is not None:
                who.check(gradient)
            _, i = self._place(param)
            ours = bucket.grads.get(i)
            foreign = ours is None or ours.data_ptr() != gradient.data_ptr()
            taken = gradient.detach() if foreign or ours is None else ours
            scale = 1.0 if who is None else who.scale
            step = self._step(optimizer, bucket, group, param, taken, scale, way)
            step.intact = not foreign and who is not None and who.version == gradient._version
            update.steps.append(step)
            _count_up(optimizer.state[param])
        return update

    @property
    def _cuda(self) -> bool:
        return self.machine.device.type == "cuda"

    def _way(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        pairs: list[tuple[dict[str, Any], nn.Parameter]],
    ) -> Way:
        if isinstance(optimizer, _ON_DEVICE):
            return Way.DEVICE if self._cuda else Way.STOCK
        if bucket.resident is not None:
            return Way.RESIDENT
        plain = all(
            param.grad is not None
            and param.grad.dtype == param.dtype == self._state_dtype(param)
            and not (self.options.stochastic_rounding and param.dtype == torch.bfloat16)
            for _, param in pairs
        )
        if self.options.lowering is Lowering.EAGER:
            return Way.STOCK if plain else Way.TORCH
        if compat.has_cpp_compiler():
            return Way.COMPILED
        return Way.FUSED if plain else Way.TORCH

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype | str:
        wanted = self.options.state_dtype
        if wanted is None:
            return param.dtype
        if wanted == "int8" and not quantizes(param.numel()):
            return torch.float32
        return wanted

    def _make_rooms(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        pairs: list[tuple[dict[str, Any], nn.Parameter]],
        *,
        by_rule: bool,
        pin: bool,
    ) -> None:
        """Memory for the states that have an element for each of the parameter's."""
        named: dict[str, dict[int, torch.dtype | str]] = {}
        for group, param in pairs:
            _, i = self._place(param)
            state = optimizer.state[param]
            for name in _names(optimizer, group) if by_rule else _like_it(param, state):
                dtype = self._state_dtype(param) if by_rule else state[name].dtype
                named.setdefault(name, {})[i] = dtype
        for name, dtypes in named.items():
            wide = {i: dtype for i, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
            narrow = sorted(dtypes.keys() - wide.keys())
            bucket.make_state(name, wide, pin=pin)
            bucket.make_codes(name, narrow, pin=pin)
            if narrow:
                _convert_state_dicts(optimizer)

    def _step(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        group: dict[str, Any],
        param: nn.Parameter,
        gradient: torch.Tensor,
        scale: float,
        way: Way,
    ) -> Step:
        key, i = self._place(param)
        state = optimizer.state[param]
        names = _names(optimizer, group) if way in _RULES else tuple(_like_it(param, state))
        first = "momentum_buffer" in names and state.get("momentum_buffer") is None
        self._adopt(bucket, i, state, names)
        if names[:1] == ("exp_avg",) and "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=_scalar_dtype())
        step = Step(
            index=i,
            grad=gradient,
            scale=scale,
            group={k: _snapshot(v) for k, v in group.items() if k != "params"},
            states=_internal(bucket, i, _of_now(state, names) if way in _RULES else state),
        )
        if isinstance(state.get("step"), torch.Tensor):
            # float64: torch.optim computes with it as a tensor, not as a number, while any thread
            # compiles (torch.compiler.is_compiling() is of the process), and must round alike
            step.states["step"] = state["step"].to(torch.float64, copy=True)
        if way in _RULES:
            count = float(state.get("step", 0)) + 1
            if isinstance(optimizer, SGD):
                step.rule = Rule.NESTEROV if group["nesterov"] else Rule.SGD
                step.hyper = sgd_hyper(group, first, scale)
                count = self._count(param)
            else:
                step.rule = Rule.ADAM
                step.hyper = adam_hyper(group, count, scale)
            if self.options.stochastic_rounding and param.dtype == torch.bfloat16:
                step.seed = seed_of(torch.initial_seed(), (key << 20) + i, int(count))
        return step

    def _count(self, param: nn.Parameter) -> int:
        """How many steps a parameter without a counter has seen: each changed its version."""
        return param._version

    def _adopt(
        self, bucket: HostBucket, i: int, state: dict[str, Any], names: Iterable[str]
    ) -> None:
        """Let `state` have views of the bucket; what was there (a loaded checkpoint) is copied."""
        for name in names:
            given = state.get(name)
            room = bucket.states[name][i]
            if isinstance(room, tuple):
                if not (isinstance(given, BlockwiseTensor) and given.codes is room[0]):
                    view = BlockwiseTensor(
                        bucket.values[i],
                        *room,
                        signed=name not in ("exp_avg_sq", "max_exp_avg_sq"),
                        settle=bucket.settle,
                    )
                    bucket.withdraw()
                    zeros = torch.zeros(bucket.values[i].shape)
                    view.store(zeros if given is None else to_plain(given).float())
                    state[name] = view
            elif given is None or given.data_ptr() != room.data_ptr() or room.numel() == 0:
                bucket.withdraw()
                if given is None:
                    room.zero_()
                else:
                    room.copy_(to_plain(given))
                state[name] = room.detach()

    @staticmethod
    def _visible(state: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a state that an update writes to."""
        return [v for k, v in state.items() if k != "step" and type(v) is torch.Tensor]

    # In the background.

    def _start(self, update: BucketUpdate, visible: list[torch.Tensor]) -> None:
        bucket = update.bucket
        indices = [step.index for step in update.steps]
        for i in indices:
            torch.autograd.graph.increment_version(bucket.params[i])
            bucket.mark_fresh(i)
        tracer = self.machine.tracer
        work = update if tracer is None else tracer.on_host(update, bucket.layout)
        flight = Flight(self._thread.submit(work), bucket.layout.name)
        bucket.start(flight, indices, visible)

    def _install(self, optimizer: Optimizer, bucket: HostBucket, steps: Iterable[Step]) -> None:
        """Take over the states that an optimizer's own first step made."""
        for step in steps:
            param = bucket.params[step.index]
            state = optimizer.state[param]
            state.update(step.states)
            names = _like_it(param, state)
            for name in names:
                bucket.make_state(name, {step.index: state[name].dtype}, pin=self._cuda)
            self._adopt(bucket, step.index, state, names)


def _count_up(state: dict[str, Any]) -> None:
    """Count a step in an optimizer's own counter."""
    if "step" in state:
        state["step"] += 1


def _drop_empty(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Where torch.optim keeps no state, `state_dict()` has no entry."""
    if param in optimizer.state and not optimizer.state[param]:
        del optimizer.state[param]


def _names(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """The states of an optimizer with a rule, in the rule's order."""
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))


def _like_it(param: torch.Tensor, state: dict[str, Any]) -> list[str]:
    """The states that have an element for each of the parameter's."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == param.shape
    ]


def _of_now(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The states that the group's options ask for; others may be left from options before."""
    return {k: v for k, v in state.items() if k == "step" or k in names}


def _internal(bucket: HostBucket, i: int, state: dict[str, Any]) -> dict[str, Any]:
    """A state as the update takes it: our own views, which nobody guards."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        room = bucket.states.get(name, {}).get(i)
        if isinstance(value, BlockwiseTensor) and not isinstance(room, tuple):
            found[name] = value.plain()
        elif room is not None:
            found[name] = room
        else:
            found[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return found


def _has_tensors(group: dict[str, Any]) -> bool:
    """Is an option a tensor, such as a tensor lr?"""
    return any(isinstance(value, torch.Tensor) for value in group.values())


def _snapshot(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _scalar_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


# The hooks.

_LIVE: weakref.WeakSet[Updates] = weakref.WeakSet()
_ATTACHED: weakref.WeakKeyDictionary[Optimizer, _Hooks]


class _Hooks:
    """The hooks on one optimizer."""

    def __init__(self) -> None:
        self.hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.converts = False  # 8-bit states in state_dict()
        self.handle: Any = None  # of `before`

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Do our part of the step; a closure is called first, because the gradients are its."""
        self._show()  # of a step that failed
        if type(optimizer) not in (*_BY_RULE, *_ON_DEVICE):
            with unguarded():
                for updates in tuple(_LIVE):
                    updates.step(optimizer)  # it says why not
            return None
        closure, args, kwargs = _closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args = (*args, lambda: loss)
        with unguarded():
            for updates in tuple(_LIVE):
                self.hidden += updates.step(optimizer)
            for param, _ in self.hidden:
                param.grad = None
        return args, kwargs

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Show the gradients again."""
        del optimizer, args, kwargs
        self._show()

    def _show(self) -> None:
        with unguarded():
            for param, gradient in self.hidden:
                if param.grad is None:
                    param.grad = gradient
        self.hidden = []


def _closure(args: Any, kwargs: Any) -> tuple[Callable[[], Any] | None, Any, Any]:
    """The closure among a step's arguments (the optimizer is the first), and the others."""
    if len(args) > 1:
        return args[1], (args[0], *args[2:]), kwargs
    others = {k: v for k, v in kwargs.items() if k != "closure"}
    return kwargs.get("closure"), args, others


def _attach(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: hook those over our parameters, behind the user's own hooks."""
    del args, kwargs
    if optimizer in _ATTACHED:
        compat.put_last(_ATTACHED[optimizer].handle)  # behind hooks that were registered since
        return
    if not _LIVE:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(updates.owns(param) for updates in tuple(_LIVE) for param in params):
        _hooks_on(optimizer)


def _hooks_on(optimizer: Optimizer) -> _Hooks:
    """The hooks on an optimizer, put there the first time."""
    if optimizer not in _ATTACHED:
        hooks = _ATTACHED[optimizer] = _Hooks()
        hooks.handle = optimizer.register_step_pre_hook(hooks.before)
        handle = optimizer.register_step_post_hook(hooks.after)
        # before the user's own, which may look at the gradients, or zero them
        compat.put_first(handle)
    return _ATTACHED[optimizer]


def _convert_state_dicts(optimizer: Optimizer) -> None:
    """Let `state_dict()` have 8-bit states as the float32 tensors that a plain run loads."""
    hooks = _hooks_on(optimizer)
    if not hooks.converts:
        hooks.converts = True
        optimizer.register_state_dict_post_hook(lambda _, state_dict: to_plain(state_dict))


_ATTACHED = weakref.WeakKeyDictionary()
register_optimizer_step_pre_hook(_attach)
