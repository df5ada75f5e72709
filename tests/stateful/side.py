"""One of two sides that a state machine trains: a plain model, or a megacompiled one.

A `Side` has what a loop has around its model: optimizers, losses that wait for their backward,
names of memory, hooks, checkpoints. Each method is something that loops do, and gives what the
user sees of it, for the comparison.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from megacompile import accumulate, full_parameters
from tests.processes import in_child, in_threads
from tests.stateful.late import Lookahead, ScheduleFree, Wrapper, may_fail
from tests.training import through_file

LIBRARY: Any = torch  # its stubs do not know all of these
WIDTH = 6
LAYERS = 3


class Layer(nn.Module):
    """(rows, WIDTH) -> (rows, WIDTH), with a buffer that the forward changes in training.

    The change is a product and a sum: torch 2.11's Dynamo, with backend "eager" too, writes
    `add_(alpha=)` so, which differs from eager code in the last bit.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + self.linear((x - self.mean) * self.gain + self.shift).tanh()


class Net(nn.Module):
    """Layers of one shape, a head whose matrix is turned, and a parameter without a use.

    There may be a graph break: "shared" has a parameter that both graphs use, the backward of
    "fails" can be made to fail there.
    """

    def __init__(self, breaks: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        self.spare = nn.Linear(2, 2)
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.breaks == "fails" and i == 1:
                x = may_fail(x)
            if self.breaks == "shared" and i == 1:
                torch._dynamo.graph_break()
                x = x + self.layers[0].get_parameter("linear.bias")  # which both graphs use
        hidden: Tensor = x.relu()
        result: Tensor = self.head(hidden)
        return result, hidden


EPS = 1e-4  # large, where a gradient is all rounding
OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2, betas=(0.5, 0.9), eps=EPS),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam, amsgrad": lambda p: Adam(p, lr=1e-2, eps=EPS, amsgrad=True, weight_decay=0.1),
    "sgd, plain": lambda p: SGD(p, lr=0.05),
    "adam, tensor lr": lambda p: Adam(
        p, lr=torch.tensor(1e-3), eps=EPS, maximize=True, foreach=False
    ),
    "lookahead": lambda p: Lookahead(AdamW(p, lr=1e-2, eps=EPS)),
    "schedule free": lambda p: ScheduleFree(SGD(p, lr=0.05, momentum=0.9)),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, eps=EPS, momentum=0.9),
}
EXTRAS = ("", "penalty", "penalty first", "head", "view", "twice", "reentrant", "other")
HOOKS = ("tensor", "post accumulate", "node", "node before", "takes away")
WRITES = ("in place", "data", "new data", "through data", "init", "foreach", "numpy", "part")
USES = (
    *("value", "sum", "numpy", "data", "item", "grad", "state_dict", "saved", "deepcopy", "stack"),
    *("lerp", "foreach", "vector", "layer", "capsule", "exported", "protocol", "array", "storage"),
    "full",
)
ALIASES = (
    *("detach", "data", "view", "numpy", "capsule", "state_dict", "state"),
    *("grad", "grad data", "grad view", "grad numpy"),
)
GRADIENTS = ("set", "scaled", "in place", "through data", "none", "swapped", "turned", "flat")
STATES = ("scaled", "set", "deleted", "through view")


# What no step can go on from: of which optimizers, an option or a state, its name, and what it is
# instead (None: it is left out).
Bad = tuple[tuple[type[Optimizer], ...], str, Callable[[Any], Any] | None]
ADAMS = (AdamW, Adam)
BAD: dict[str, Bad] = {
    "lr is text": ((*ADAMS, SGD), "lr", lambda _: "0.1"),
    "momentum is text": ((SGD,), "momentum", lambda _: "0.9"),
    "one beta": (ADAMS, "betas", lambda betas: betas[:1]),
    "beta above 1": (ADAMS, "betas", lambda betas: (0.9, 1.5)),
    "no eps": (ADAMS, "eps", None),
    "amsgrad later": ((AdamW,), "amsgrad", lambda _: True),
    "one element": (ADAMS, "exp_avg_sq", lambda t: t[:1, :1] + 0),
    "flat": ((SGD,), "momentum_buffer", lambda t: t.flatten()),
    "a part": (ADAMS, "exp_avg", lambda t: t[:3] + 0),
    "max": ((Adam,), "max_exp_avg_sq", lambda t: t[0] + 0),
    "a list": (ADAMS, "exp_avg", lambda t: t.tolist()),
    "whole numbers": (ADAMS, "exp_avg", lambda t: t.long()),
    "no exp_avg_sq": (ADAMS, "exp_avg_sq", None),
    "two steps": (ADAMS, "step", lambda t: t.expand(2).clone()),
}
BAD_FOR_TORCH: dict[str, Bad] = {  # whose own step makes the update
    "float64": (ADAMS, "exp_avg", lambda t: t.double()),
    "tensor lr": (ADAMS, "lr", lambda _: torch.tensor(0.1)),
}


@contextlib.contextmanager
def spoilt(optimizer: Optimizer, param: Tensor, bad: Bad) -> Iterator[bool]:
    """For its duration one of these is so; gives if it can be."""
    kinds, name, change = bad
    groups = [g for g in optimizer.param_groups if any(p is param for p in g["params"])]
    group = groups[0] if groups else {}
    holder = group if name in group else optimizer.state.get(param, {})
    able = type(optimizer) in kinds and name in holder
    was, others = holder.get(name), dict(holder)
    if able and change is None:
        del holder[name]
    elif able and change is not None:
        holder[name] = change(was)
        if name == "lr" and isinstance(holder[name], Tensor):
            holder["foreach"] = True
    try:
        yield able
    finally:
        holder.clear()
        holder.update(others)


class Planted(Exception):
    """What the user's code raises."""


class Side:
    """A model, captured once, and what a loop has around it, like the optimizer of a backward."""

    def __init__(self, model: Any, *, compiled: bool, updates: Optimizer | None = None) -> None:
        self.model, self.compiled, self.updates = model, compiled, updates
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.other = nn.Parameter(torch.ones(3))  # the model does not have it
        self.start = copy.deepcopy(model.state_dict())
        self.reset("adamw", whole=True)

    def reset(self, kind: str, *, whole: bool) -> None:
        """As at first, with a new optimizer of this kind; not `whole`: it lacks the head."""
        for layer in self.model.layers:
            layer.linear.weight = None
        for name, param in self.params.items():
            module, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(module), attribute, param)
            param.requires_grad_(True)
        self.model.train()
        self.model.zero_grad()
        self.model.load_state_dict(self.start)
        self.other.grad = None
        self.other.data.fill_(1)
        some = [p for n, p in self.params.items() if whole or not n.startswith("head")]
        some.insert(4, self.other)
        if self.updates is None:
            self.optimizers = [OPTIMIZERS[kind](some)]
        else:
            self.updates.state.clear()
            self.updates.param_groups[0].update(lr=1e-2, initial_lr=1e-2)
            self.optimizers = [self.updates]
        self.scheduler = LambdaLR(self.optimizers[0], lambda i: 1 / (1 + i))
        self.losses: list[Tensor] = []
        self.aliases: list[Any] = []
        self.hooks: list[Any] = []
        self.nodes: list[Any] = []
        self.seen: list[list[Any]] = []  # by each hook: the order of parameters is the graphs'
        self.saved: Any = None

    def end(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.optimizers, self.losses, self.aliases, self.hooks = [], [], [], []
        self.nodes = []

    def param(self, number: int) -> nn.Parameter:
        """One of those that are trained and that a call uses."""
        named = self.model.named_parameters()
        found: list[nn.Parameter] = [p for n, p in named if not n.startswith("spare")]
        return found[number % len(found)]

    def shape(self, *, buffers: bool = True) -> list[Any]:
        found: list[Any] = [(n, p.detach().clone()) for n, p in self.model.named_parameters()]
        if self.updates is None:
            every = [*self.params.values(), self.other]
            found += [None if p.grad is None else p.grad.clone() for p in every]
        found += [buffer.clone() for buffer in self.model.buffers() if buffers]
        found += [copy.deepcopy(each.state_dict()) for each in self.optimizers]
        found += [copied(alias) for alias in [self.other, *self.aliases]]
        return [*found, *map(list, self.seen)]

    # --- calls of the model

    def forward(self, rows: int, seed: int, extra: str, needs: bool) -> list[Any]:
        """A loss that waits for its backward."""
        x = inputs(rows, seed).requires_grad_(needs)
        total = self.penalty() if extra == "penalty first" else torch.zeros(())
        out, hidden = self.model(x)
        total = total + out.square().mean() + (hidden.mean() if seed % 2 else 0.0)
        if extra == "twice":
            again = (x + 1).detach()  # limits.md: the sum of what several calls hand to an input
            total = total + self.model(again)[0].mean()
        elif extra == "reentrant":  # a backward inside of a backward
            again = (x + 1).detach().requires_grad_()
            total = total + checkpoint(self.model, again, use_reentrant=True)[0].mean()
        elif extra == "penalty":
            total = total + self.penalty()
        elif extra == "head":
            total = total + self.model.head(inputs(3, seed + 1)).mean()
        elif extra == "view":
            total = total + self.model.layers[1].linear.weight.view(-1)[:5].square().sum()
        elif extra == "other":
            total = total + self.other.square().sum()
        self.losses.append(total)
        self.x = x
        return [total.detach().clone(), out.detach().clone(), hidden.detach().clone()]

    def penalty(self) -> Tensor:
        """Of all parameters that are trained."""
        used = [p for n, p in self.model.named_parameters() if not n.startswith("spare")]
        return 0.01 * torch.stack([p.square().sum() for p in used]).sum()

    def evaluate(self, rows: int, mode: str) -> list[Any]:
        way = torch.inference_mode if mode == "inference" else torch.no_grad
        self.model.train(mode == "train")
        with way():
            out, hidden = self.model(inputs(rows, rows))
        self.model.train()
        return [out.clone(), hidden.clone()]

    def backward(self, which: int, how: str) -> list[Any]:
        """Of one of the losses that wait."""
        which %= len(self.losses)
        loss = self.losses[which] if how == "retain" else self.losses.pop(which)
        found: Any = None
        if how == "thread":
            in_threads([loss.backward])
        elif how == "grad":
            params = [p for p in self.params.values() if p.requires_grad]
            found = torch.autograd.grad(loss, params, allow_unused=True)
        elif how == "inputs":
            loss.backward(inputs=[p for p in list(self.params.values())[2:7] if p.requires_grad])
        else:
            loss.backward(retain_graph=how == "retain")
        return [found, None if self.x.grad is None else self.x.grad.clone()]

    def all_backwards(self) -> None:
        torch.stack(self.losses).sum().backward()
        self.losses.clear()

    def drop(self) -> None:
        self.losses.clear()

    def fail(self, where: str, number: int) -> None:
        """Code of the user's raises: in the forward, in the backward, or around the step."""
        if where == "forward":
            self.model(torch.ones(3, WIDTH + 1))
        if where in ("loss", "hook", "behind"):
            loss = self.losses.pop()
            at: Any = loss if where == "loss" else self.param(number)
            behind = where == "behind"
            register = at.register_post_accumulate_grad_hook if behind else at.register_hook
            handle = register(raise_planted)
            had = [p for p in self.params.values() if p.grad is not None]
            try:
                loss.backward()
            finally:
                handle.remove()
                assert self.hooks or all(p.grad is not None for p in had)
        if where in ("pre hook", "post hook"):
            of: Any = self.optimizers[0]
            before = where == "pre hook"
            handle = (of.register_step_pre_hook if before else of.register_step_post_hook)(
                raise_planted
            )
            try:
                of.step()
            finally:
                handle.remove()
        if where == "closure":
            self.optimizers[0].step(raise_planted)

    # --- steps

    def whole_step(self, seed: int, micro: int, wrapped: bool = False) -> list[Any]:
        """Of some micro-batches, of which all but the last are marked."""
        found = []
        for k in range(micro):
            total = self.model(inputs(3, seed + k))[0].square().mean()
            marks = self.compiled and k + 1 < micro
            with accumulate(self.model) if marks else contextlib.nullcontext():
                total.backward()
            found.append(total.detach().clone())
        (Wrapper(self.optimizers[0]) if wrapped else self.optimizers[0]).step()
        self.optimizers[0].zero_grad()
        return found

    def step_of_the_head(self, seed: int) -> None:
        """By an optimizer of its own, over what was accumulated; and of what is elsewhere."""
        with accumulate(self.model) if self.compiled else contextlib.nullcontext():
            self.model(inputs(3, seed))[0].square().mean().backward()
        self.other.sum().backward()
        SGD([*self.model.head.parameters(), self.other], lr=0.1).step()
        self.optimizers[0].zero_grad()
        self.other.grad = None

    @property
    def wrapped(self) -> bool:
        """Does an optimizer wrap another?"""
        return isinstance(self.optimizers[0], (Lookahead, ScheduleFree))

    def step(self, which: int) -> None:
        self.optimizers[which % len(self.optimizers)].step()

    def closure(self, seed: int) -> list[Any]:
        """A step that makes its own gradients."""

        def closure() -> Any:
            self.optimizers[0].zero_grad()
            loss: Tensor = self.model(inputs(3, seed))[0].square().mean()
            loss.backward()
            assert loss.requires_grad
            return loss.detach()

        with torch.no_grad():
            return [self.optimizers[0].step(closure)]

    def scaled(self, seed: int, scale: float) -> list[Any]:
        """A step of a scaled loss, which is left out where gradients overflow."""
        optimizer, scaler = self.optimizers[0], torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer.zero_grad()
        scaler.scale(self.model(inputs(3, seed))[0].square().mean() * 4).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.params.values(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        self.model.zero_grad()
        return [norm.clone(), scaler.get_scale()]

    def step_hook(self) -> None:
        """One that scales gradients ahead of the step."""

        def scale(*_: Any) -> None:
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.mul_(0.5)

        self.hooks.append(self.optimizers[0].register_step_pre_hook(scale))

    def zero_grad(self, to_none: bool, by_model: bool) -> None:
        (self.model if by_model else self.optimizers[0]).zero_grad(set_to_none=to_none)

    def clip(self, largest: float, foreach: bool) -> list[Any]:
        norm = nn.utils.clip_grad_norm_(self.params.values(), largest, foreach=foreach)
        return [norm.clone()]

    def schedule(self) -> None:
        self.scheduler.step()

    def options(self, option: tuple[str, float]) -> None:
        name, value = option
        for group in self.optimizers[0].param_groups:
            if name in group:
                group[name] = value

    def add_group(self) -> None:
        """The head, if it is not there."""
        optimizer = self.optimizers[0]
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        head = [p for p in self.model.head.parameters() if id(p) not in known]
        if head:
            optimizer.add_param_group({"params": head, "lr": 1e-3})
            self.scheduler = LambdaLR(optimizer, lambda i: 1 / (1 + i))

    def other_optimizer(self, kind: str, states: str, keep: bool) -> None:
        """Another optimizer, beside the one that there is or in its place."""
        of = self.optimizers[0]
        params = [p for group in of.param_groups for p in group["params"]]
        made = OPTIMIZERS[kind](params)
        if states and type(made) is type(of) and len(of.param_groups) == 1:
            given = of.state_dict()
            made.load_state_dict(given if states == "shared" else copy.deepcopy(given))
        self.optimizers = [made, of] if keep else [made]

    def state(self, number: int, how: str) -> None:
        state = self.optimizers[0].state.get(self.param(number), {})
        names = [n for n, value in state.items() if isinstance(value, Tensor) and value.dim()]
        for name in names[:1]:
            if how == "scaled":
                state[name].mul_(0.5)
            elif how == "set":
                state[name] = torch.full_like(state[name], 0.25)
            elif how == "deleted":
                del self.optimizers[0].state[self.param(number)]
            else:
                state[name].view(-1)[:2].fill_(0.5)

    # --- what is written to parameters and gradients

    def write(self, number: int, how: str, value: float) -> None:
        param = self.param(number)
        writes: dict[str, Callable[[], object]] = {
            "in place": lambda: param.mul_(value),
            "data": lambda: setattr(param, "data", param.data * value),
            "new data": lambda: setattr(param, "data", torch.full_like(param, value)),
            "through data": lambda: param.data.add_(value),
            "init": lambda: nn.init.constant_(param, value),
            "foreach": lambda: torch._foreach_mul_([param, self.param(number + 1)], value),
            "numpy": lambda: param.detach().numpy().__imul__(value),
            "part": lambda: param[:2].copy_(torch.full_like(param[:2], value)),
        }
        with torch.no_grad():
            writes[how]()

    def swap_data(self) -> None:
        """Of two parameters in different buckets."""
        a, b = (self.model.layers[i].linear.bias for i in (0, 2))
        a.data, b.data = b.data, a.data

    def gradient(self, number: int, how: str) -> None:
        param = self.param(number)
        if how == "set":
            param.grad = torch.full_like(param, 0.1)
        elif how == "turned":
            there = torch.linspace(-0.1, 0.1, param.numel())
            param.grad = there.view(*reversed(param.shape)).t() if param.dim() == 2 else None
        elif how == "none" or param.grad is None:
            param.grad = None
        elif how == "scaled":
            param.grad = param.grad * 2
        elif how == "in place":
            param.grad.mul_(0.5)
        elif how == "through data":
            param.grad.data.mul_(0.5)
        elif how == "flat":  # all are views of one tensor
            having = [p for p in self.params.values() if p.grad is not None]
            grads = [p.grad for p in having if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            parts = flat.split([grad.numel() for grad in grads])
            for p, part in zip(having, parts, strict=True):
                p.grad = part.view_as(p)
        else:
            a, b = (self.model.layers[i].linear.weight for i in (0, 2))
            a.grad, b.grad = b.grad, a.grad

    def alias(self, number: int, kind: str) -> None:
        param = self.param(number)
        state = list(self.optimizers[0].state.get(param, {}).values())
        of_grad = kind.startswith("grad") and param.grad is not None
        grad: Any = param.grad if of_grad else torch.zeros(1)
        made: dict[str, Callable[[], Any]] = {
            "detach": param.detach,
            "capsule": lambda: LIBRARY.from_dlpack(LIBRARY.utils.dlpack.to_dlpack(param.detach())),
            "data": lambda: param.data,
            "view": lambda: param.detach().view(-1)[1:4],
            "numpy": lambda: param.detach().numpy(),
            "state_dict": lambda: dict(self.model.state_dict()),
            "grad": lambda: grad,
            "grad data": lambda: grad.data,
            "grad view": lambda: grad.view(-1)[:2],
            "grad numpy": lambda: grad.numpy(),
            "state": lambda: state[-1].view(-1) if state else None,
        }
        self.aliases.append(made[kind]())

    def write_alias(self, which: int) -> None:
        alias = self.aliases[which % len(self.aliases)]
        for each in alias.values() if isinstance(alias, dict) else [alias]:
            if each is not None and (not isinstance(each, Tensor) or each.is_floating_point()):
                each *= 0.5

    def forget(self) -> None:
        self.aliases.clear()

    # --- the model as a whole

    def look(self, number: int, use: str) -> list[Any]:
        """Whoever reads waits for what is in flight."""
        param = self.param(number)
        at = param.storage_offset(), param.shape, param.stride()
        uses: dict[str, Callable[[], Any]] = {
            "value": lambda: param + 0,
            "sum": param.sum,
            "numpy": lambda: param.detach().numpy().copy(),
            "data": lambda: param.data.clone(),
            "item": lambda: param.view(-1)[0].item(),
            "grad": lambda: None if param.grad is None else param.grad * 1,
            "state_dict": lambda: copied(dict(self.model.state_dict())),
            "saved": lambda: through_file(self.optimizers[0].state_dict()),
            "deepcopy": lambda: copy.deepcopy(param).detach(),
            "stack": lambda: torch.stack([param, torch.ones_like(param)]),
            "lerp": lambda: torch.ones_like(param).lerp_(param, 0.25),
            "foreach": lambda: list(torch._foreach_mul([param.detach()], 2.0)),
            "capsule": lambda: LIBRARY.from_dlpack(LIBRARY.utils.dlpack.to_dlpack(param)) + 0,
            "exported": lambda: LIBRARY.from_dlpack(LIBRARY._C._to_dlpack_versioned(param)) + 0,
            "protocol": lambda: LIBRARY.from_dlpack(param.detach().__dlpack__()) + 0,
            "array": lambda: np.asarray(param.detach()).copy(),
            "storage": lambda: torch.empty(0).set_(param.untyped_storage(), *at) + 0,
            "full": self.full,
            "vector": lambda: nn.utils.parameters_to_vector(self.model.parameters()),
            "layer": lambda: self.model.layers[number % LAYERS].eval()(inputs(2, 1)),
        }
        with torch.no_grad():
            found = uses[use]()
        self.model.train()
        return [found]

    def full(self) -> list[Any]:
        found = full_parameters(self.model) if self.compiled else self.model.named_parameters()
        return sorted((name, value.detach().clone()) for name, value in found)

    def hook(self, number: int, kind: str) -> None:
        """Register one that notes what it sees; some change the gradient."""
        param = self.param(number)

        mine: list[Any] = []
        self.seen.append(mine)

        def halve(gradient: Tensor) -> Tensor:
            mine.append(gradient.clone())
            return gradient * 0.5

        def note(of: Tensor) -> None:
            mine.append(None if of.grad is None else of.grad.clone())

        def take(*_: Any) -> None:
            """As Megatron and Apex do, which add gradients to buffers of their own."""
            note(param)
            param.grad = None

        if not param.requires_grad:  # as torch says of most hooks
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        node = torch.autograd.graph.get_gradient_edge(param).node
        register: dict[str, Callable[[], Any]] = {
            "tensor": lambda: param.register_hook(halve),
            "post accumulate": lambda: param.register_post_accumulate_grad_hook(note),
            "node": lambda: node.register_hook(lambda *_: note(param)),
            "node before": lambda: node.register_prehook(lambda _: note(param)),
            "takes away": lambda: node.register_hook(take),
        }
        self.hooks.append(register[kind]())
        self.nodes.append(node)  # it lives as long

    def unhook(self) -> None:
        self.hooks.pop().remove()

    def freeze(self, frozen: bool) -> None:
        self.model.layers[1].requires_grad_(not frozen)

    def tie(self) -> None:
        """A layer gets the matrix of another one."""
        self.model.layers[2].linear.weight = self.model.layers[0].linear.weight

    def save(self, by: str) -> None:
        found = [self.model.state_dict(), [each.state_dict() for each in self.optimizers]]
        self.saved = through_file(found) if by == "file" else copy.deepcopy(found)
        self.saved.append([type(each) for each in self.optimizers])

    def load(self, halves: tuple[bool, bool]) -> None:
        """A checkpoint, or the half of it: that of the model, or of the optimizer."""
        model, optimizer = halves
        states, others, kinds = self.saved
        if model:
            values = {name: value.clone() for name, value in states.items()}
            self.model.load_state_dict(values)
        if optimizer:
            for each, state, kind in zip(self.optimizers, others, kinds, strict=False):
                if type(each) is kind:
                    each.load_state_dict(copy.deepcopy(state))

    def copied_model(self, by: str) -> list[Any]:
        """A copy is a plain model that trains on its own."""
        other = (
            copy.deepcopy(self.model)
            if by == "deepcopy"
            else pickle.loads(pickle.dumps(self.model))
        )
        out, _ = other(inputs(3, 5))
        out.square().mean().backward()
        return [[p.detach().clone(), p.grad] for p in other.parameters()]

    def fork(self) -> list[Any]:
        """A child reads all parameters, and writes to them."""

        def use() -> list[Any]:
            found = [param.detach().clone().numpy() for param in self.model.parameters()]
            with torch.no_grad():
                for param in self.model.parameters():
                    param.fill_(7.0)
            return found

        found: list[Any] = in_child(use)
        return found

    def send(self, by: str) -> None:
        """To another process, by the megacompiled model alone: a fork would share the memory."""
        if self.compiled and by == "share_memory()":
            self.model.share_memory()
        elif self.compiled:
            ForkingPickler.dumps(list(self.model.parameters()))


def raise_planted(*args: Any) -> Any:
    raise Planted


def inputs(rows: int, seed: int) -> Tensor:
    """(rows, WIDTH)."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def copied(value: Any) -> Any:
    """A copy of what is in containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return copy.copy(value)
