"""Random training loops around a model, as data that hypothesis can draw, shrink and print.

`run` trains a model, plain or megacompiled, as a `Net`, a `Choice` and a `Loop` say, and gives
everything that can be seen. A `Loop` is what users do beside `loss.backward()` and `step()`; each
of `FEATURES` is one member of it, or of `Net`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megacompile import api
from tests import inside, nets
from tests.nets import BATCH, WIDTH, Choice, Net
from tests.processes import in_child

Result = dict[str, Tensor]
STEPS = 2  # of a loop in which something happens between steps
HOOKS = ("tensor", "post accumulate", "node", "node before")

OF_NETS = ("lengths", "numbers")  # members of `Net`


@dataclass(frozen=True)
class Loop:
    penalty: int = 0  # bits: parameters whose squares are added to the loss
    penalty_first: bool = False  # computed before the call of the model
    view: int = -1  # a layer of whose matrix a view is used outside; the model does not know it
    head: bool = False  # the model's head is called outside too
    twice: bool = False  # two calls of the model in one loss
    hooks: tuple[tuple[str, int], ...] = ()  # (one of HOOKS, the number of a parameter)
    threads: bool = False  # all backwards of a step at once, each in a thread of its own
    given: int = 0  # bits: parameters whose `p.grad` is put there before each backward
    tie: tuple[int, int] | None = None  # layers: after the first step one gets the other's matrix
    fork: bool = False  # after each step a child writes to all parameters, and exits
    interrupt: int = -1  # a seed: before, a loop was interrupted there

    @property
    def outside(self) -> bool:
        return self.penalty != 0 or self.view >= 0 or self.head

    def features(self, net: Net) -> tuple[str, ...]:
        return tuple(name for name, has in _FEATURES.items() if has(self, net))

    def rounds(self, net: Net) -> bool:
        """May a gradient be summed in another order than in the plain model?"""
        uses = collections.Counter(net.calls)
        tied = [*net.tied, *([self.tie] if self.tie else [])]
        several = bool(tied) or any(count > 1 for count in uses.values())
        return several and (self.outside or self.twice)

    def refused(self, choice: Choice) -> bool:
        return choice.in_backward and (self.outside or self.twice or bool(self.hooks))


_FEATURES: dict[str, Callable[[Loop, Net], bool]] = {
    "penalty": lambda loop, net: loop.penalty != 0,
    "view outside": lambda loop, net: loop.view >= 0,
    "head outside": lambda loop, net: loop.head,
    "twice": lambda loop, net: loop.twice,
    "hooks": lambda loop, net: bool(loop.hooks),
    "threads": lambda loop, net: loop.threads,
    "given gradients": lambda loop, net: loop.given != 0,
    "ties later": lambda loop, net: loop.tie is not None,
    "forks": lambda loop, net: loop.fork,
    "interrupts": lambda loop, net: loop.interrupt >= 0,
    "lengths": lambda loop, net: len(set(net.rows)) > 1,
    "numbers": lambda loop, net: net.numbers,
}
FEATURES = tuple(_FEATURES)  # what is drawn


def run(
    model: Any, net: Net, choice: Choice, loop: Loop, optimizer: Any, *, first: int = 0
) -> Result:
    """Train a little, from micro-batch `first` on; gives everything that can be seen."""
    seen: Result = {}
    steps = STEPS if optimizer is not None or loop.tie or loop.fork else 1
    with _hooked(model, loop, seen), _tied_later(model, loop) as tie:
        training = Training(model, net, choice, loop, seen, first)
        for step in range(steps):
            training.backwards(step)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if loop.fork:
                child_writes(model)
            if step == 0:
                tie()
        seen |= {name: param.detach().clone() for name, param in model.named_parameters()}
        seen |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return seen


class Training:
    def __init__(
        self, model: Any, net: Net, choice: Choice, loop: Loop, seen: Result, first: int
    ) -> None:
        self.model, self.net, self.choice, self.loop, self.seen = model, net, choice, loop, seen
        self.first = first
        self.streamed = inside.is_streamed(model)
        self.alias = None if loop.view < 0 else _matrix(model, loop.view).t()

    def backwards(self, step: int) -> None:
        first = self.first + step * self.choice.backwards
        numbers = [first + k for k in range(self.choice.backwards)]
        if self.loop.threads:
            losses = [self.loss(which) for which in numbers]
            in_threads([total.backward for total, _ in losses])
            for which, (_, inputs) in zip(numbers, losses, strict=True):
                self._look(which, inputs)
        else:
            for which in numbers:
                total, inputs = self.loss(which)
                self._give()
                last = which == numbers[-1]
                accumulates = self.streamed and self.choice.in_backward and not last
                with api.accumulate(self.model) if accumulates else contextlib.nullcontext():
                    total.backward()
                self._look(which, inputs)
        if not self.choice.in_backward:
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    self.seen[f"{step}.{name}.grad"] = param.grad.detach().clone()

    def loss(self, which: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """What is differentiated, and the inputs."""
        loop = self.loop
        torch.manual_seed(which)
        penalty = self._penalty() if loop.penalty_first else None
        total, inputs = self._call(f"{which}", which)
        batches = [inputs]
        if loop.twice:
            more, inputs = self._call(f"{which}.again", which + 100)
            total = total + more
            batches.append(inputs)
        if loop.head:
            x = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH)
            total = total + self.model.head(x).square().mean()
        if self.alias is not None:
            total = total + 0.1 * self.alias.square().sum()
        if loop.penalty:
            total = total + (self._penalty() if penalty is None else penalty)
        self.seen[f"{which}.total"] = total.detach().clone()
        return total, batches

    def _call(self, name: str, which: int) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = nets.data(self.net, which)
        loss, values = self.model(**inputs, **nets.numbers(self.net, which))
        total: Tensor = loss
        for value in values if self.net.in_loss else []:
            total = total + value.square().sum()
        self.seen[f"{name}.loss"] = loss.detach().clone()
        self.seen |= {f"{name}.out{i}": v.detach().clone() for i, v in enumerate(values)}
        self.seen |= {f"{name}.{key}": value.detach().clone() for key, value in inputs.items()}
        return total, inputs

    def _give(self) -> None:
        """Put gradients there: what there is, in other memory."""
        for k, param in enumerate(self.model.parameters()):
            if self.loop.given >> k % 8 & 1 and param.requires_grad:
                so_far = 0.25 if param.grad is None else param.grad.detach()
                param.grad = torch.zeros_like(param).add_(so_far)

    def _penalty(self) -> Tensor:
        chosen = [
            p for k, p in enumerate(self.model.parameters()) if self.loop.penalty >> k % 8 & 1
        ]
        return torch.stack([0.01 * param.square().sum() for param in chosen]).sum()

    def _look(self, which: int, batches: list[dict[str, Tensor]]) -> None:
        for k, inputs in enumerate(batches):
            if (gradient := inputs["x"].grad) is not None:
                self.seen[f"{which}.x{k}.grad"] = gradient.clone()
        self.seen[f"{which}.rng"] = torch.get_rng_state()


def _matrix(model: Any, layer: int) -> Tensor:
    return model.layers[layer].linear.weight


@contextlib.contextmanager
def _hooked(model: Any, loop: Loop, seen: Result) -> Iterator[None]:
    """Hooks that write down what they see, and in which order of modules; one kind changes the
    gradient. Of a module whose gradients one node makes, such as LayerNorm, autograd has no order.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    handles, nodes = [], []
    modules: list[str] = []  # one after the other
    calls: collections.Counter[str] = collections.Counter()

    def see(name: str, value: Tensor | None) -> None:
        module = modules_of[name]
        if not modules or modules[-1] != module:
            modules.append(module)
        at = f"{name}.{len(modules)}.{calls[name]}"
        seen[at] = torch.empty(0) if value is None else value.detach().clone()
        calls[name] += 1

    modules_of: dict[str, str] = {}

    def register(kind: str, number: int) -> Any:
        of, param = trained[number % len(trained)]
        name = f"hook on {number} ({kind})"
        modules_of[name] = of.rpartition(".")[0]

        def halve(gradient: Tensor) -> Tensor:
            see(name, gradient)
            return gradient * 0.5

        if kind == "tensor":
            return param.register_hook(halve)
        if kind == "post accumulate":
            return param.register_post_accumulate_grad_hook(lambda p: see(name, p.grad))
        nodes.append(param.view_as(param).grad_fn.next_functions[0][0])  # it lives as long
        if kind == "node":
            return nodes[-1].register_hook(lambda *_: see(name, param.grad))
        return nodes[-1].register_prehook(lambda gradients: see(name, gradients[0]))

    handles = [register(kind, number) for kind, number in loop.hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _tied_later(model: Any, loop: Loop) -> Iterator[Callable[[], None]]:
    """A function that ties; at the end all is as before."""
    before = {i: _matrix(model, i) for i in loop.tie or ()}

    def tie() -> None:
        if loop.tie is not None:
            one, other = loop.tie
            model.layers[one].linear.weight = _matrix(model, other)

    try:
        yield tie
    finally:
        for i, matrix in before.items():
            model.layers[i].linear.weight = matrix


def in_threads(calls: list[Callable[[], Any]]) -> None:
    """All at once, with many switches; which come when is up to Python: a fault may come and go."""
    failed: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> None:
        begin.wait()
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failed:
        raise failed[0]


def child_writes(model: Any) -> None:

    def write() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)

    in_child(write)


@st.composite
def loops(draw: st.DrawFn, net: Net, choice: Choice, features: tuple[str, ...]) -> Loop:
    """Any `Loop` with some of these features; a quarter have none."""
    layers = st.integers(0, len(net.kinds) - 1)
    able = [name for name in features if name not in OF_NETS]
    if choice.in_backward:  # of several threads the first would update
        able = [name for name in able if name != "threads"]
    names = {draw(st.sampled_from([*able, *[""] * (len(able) // 3)]))} if able else set()
    if names - {""}:
        names |= draw(st.sets(st.sampled_from(able), max_size=2))
    hooks = st.lists(st.tuples(st.sampled_from(HOOKS), st.integers(0, 15)), min_size=1, max_size=4)
    bits = st.integers(1, 255)
    pairs = st.tuples(layers, layers).filter(lambda pair: pair[0] != pair[1])
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "penalty": lambda: {
            "penalty": draw(st.one_of(st.just(255), bits)),
            "penalty_first": draw(st.booleans()),
        },
        "view outside": lambda: {"view": draw(layers)},
        "head outside": lambda: {"head": True},
        "twice": lambda: {"twice": True},
        "hooks": lambda: {"hooks": tuple(draw(hooks))},
        "threads": lambda: {"threads": choice.backwards > 1},
        "given gradients": lambda: {"given": draw(bits)},
        "ties later": lambda: {"tie": draw(pairs)},
        "forks": lambda: {"fork": True},
        "interrupts": lambda: {"interrupt": draw(st.integers(0, 2**16))},
    }
    loop = Loop()
    for name in (name for name in able if name in names):
        loop = dataclasses.replace(loop, **made[name]())
    if loop.threads and loop.hooks:  # what they see depends on who comes first
        loop = dataclasses.replace(loop, hooks=())
    if loop.threads and not choice.optimizer:  # a second step adds to gradients, in their order
        loop = dataclasses.replace(loop, fork=False, tie=None)
    if loop.tie:  # parameters move to other buckets, which a view does not: megacompile says so
        loop = dataclasses.replace(loop, view=-1)
    return loop


@st.composite
def cases(draw: st.DrawFn, features: tuple[str, ...]) -> tuple[Net, Choice, Loop]:
    of_net = {name: name in features for name in OF_NETS}
    net, choice = draw(nets.nets(**of_net)), draw(nets.choices())
    return net, choice, draw(loops(net, choice, features))
