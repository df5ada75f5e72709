"""A cell of the table: a model, a loop around it, and the options that it is megacompiled with.

The streamed model is on an adversarial device, and on a disk that shows what is not read or written
yet as NaN. It must be equal to the plain one. Where the arithmetic is not torch.optim's (another
dtype, an update in the backward), it must be equal to the same model with all else left out:
everything is streamed from host memory, in program order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, RMSprop

from megacompile import accumulate, full_parameters, megacompile, released
from tests import adversary, disks, inside
from tests.training import Lion

BF16 = torch.bfloat16
WIDTH = 67  # matrices have blocks for 8-bit states, the last one short, and share pages of a disk


MODELS = (
    "tied",
    "shared layer",  # and a value that skips over stages
    "dropout",  # and sizes that change
    "batch norm",
    "adapters",
    "graph break",
    "unused",
)


class Layer(nn.Module):
    """(rows, WIDTH) -> (rows, WIDTH)"""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        if kind == "adapters":  # a frozen base in the same bucket
            self.norm.requires_grad_(False)
            self.up.requires_grad_(False)
            self.down = nn.Linear(WIDTH, 3, bias=False)
            self.back = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.norm(x))
        if self.kind == "adapters":
            y = y + self.back(self.down(x))
        if self.kind == "dropout":
            y = F.dropout(y, 0.3, self.training)
        if self.kind == "batch norm":
            return F.relu(y, inplace=True)
        return x + torch.tanh(y)


class Net(nn.Module):
    """An input layer, three layers and a head; gives (loss, prediction)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = kind == "tied"
        self.embed = nn.Embedding(WIDTH, WIDTH) if self.tokens else nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        made: Any = self.layers
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "unused":
            made[1].extra = nn.Parameter(torch.ones(3))
            self.spare = nn.Linear(2, 2)
        if kind == "adapters":
            self.embed.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        early = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            early.append(x)
            if self.kind == "graph break" and i == 1:
                torch._dynamo.graph_break()
        if self.kind == "shared layer":
            x = self.layers[0](self.layers[1](x * early[0]))
        prediction: Tensor = self.head(x)
        if self.tokens:
            return F.cross_entropy(prediction, y), prediction
        return F.mse_loss(prediction, y), prediction


def data(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = 3 + seed % 3 if kind == "dropout" else 5
    if kind == "tied":
        ids = torch.randint(WIDTH, (rows,), generator=generator)
        return ids, ids.roll(1)
    x, y = (torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x, y


BY_RULE = ("adamw", "amsgrad", "sgd", "nesterov", "lion")
OPTIMIZERS = (*BY_RULE, "muon", "rmsprop", "adafactor")


def optimizers(name: str, model: Any) -> list[Optimizer]:
    """Over two groups: matrices, and vectors, which decay otherwise."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2]
    vectors: dict[str, Any] = {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.01}
    groups: Any = [{"params": matrices}, vectors] if vectors["params"] else [{"params": matrices}]
    if name == "muon":
        rest = [p for p in trained if p.dim() != 2 or p is model.head.weight]
        hidden = [p for p in matrices if p is not model.head.weight]
        return [Muon(hidden, lr=0.02), AdamW(rest, lr=1e-2)]
    makes: dict[str, Callable[[], Optimizer]] = {
        "adamw": lambda: AdamW(groups, lr=1e-2, weight_decay=0.1),
        "amsgrad": lambda: Adam(groups, lr=1e-2, weight_decay=0.1, amsgrad=True),
        "sgd": lambda: SGD(groups, lr=0.1),
        "nesterov": lambda: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        "lion": lambda: Lion(groups, lr=1e-3, weight_decay=0.1),
        "rmsprop": lambda: RMSprop(groups, lr=1e-3),
        "adafactor": lambda: Adafactor(groups, lr=1e-2),
    }
    return [makes[name]()]


NUMBERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "autocast": {},
    "bf16 states and gradients": {"state_dtype": BF16, "grad_dtype": BF16},
    "8-bit states": {"state_dtype": "int8"},
    "masters": {"compute_dtype": BF16},
    "masters, 8 bits, bf16 gradients": {
        "compute_dtype": BF16,
        "grad_dtype": BF16,
        "state_dtype": "int8",
    },
    "rounded, 8 bits": {"stochastic_rounding": True, "state_dtype": "int8"},
}
SAVED: dict[str, dict[str, Any]] = {  # `choice`: of the plan
    "keep": {"activations": "keep"},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "disk": {"activations": "offload", "disk_saved": True},
    "on the host": {"choice": {"keep": 1, "saved_on_host": 2}},
    "halves, rerun": {"choice": {"keep": 3, "halves": True, "rerun": True}},
    "some of each": {"choice": {"keep": 2, "offload": 1, "rerun": True, "state_delay": 2}},
}
WEIGHTS = ("streamed", "resident", "some resident", "moving", "disk")
STATES = ("host", "disk", "some on disk")
UPDATERS = ("step", "backward")
SLOTS: dict[str, dict[str, Any]] = {
    "1 ahead": {"lookahead": 1},
    "2 ahead": {},
    "3 ahead of 6": {"lookahead": 3, "slots": 6},
}


@dataclass(frozen=True)
class Cell:
    """One of each axis."""

    model: str = "unused"
    optimizer: str = "adamw"
    numbers: str = "exact"
    saved: str = "keep"
    weights: str = "streamed"
    states: str = "host"
    updater: str = "step"
    slots: str = "2 ahead"
    loop: str = "once"

    @property
    def in_backward(self) -> bool:
        return self.updater == "backward"

    @property
    def is_exact(self) -> bool:
        """Is the arithmetic that of the plain loop?"""
        return self.numbers in ("exact", "autocast") and not self.in_backward

    @property
    def alike(self) -> Cell:
        """The cell whose numbers it must have."""
        return Cell(self.model, self.optimizer, self.numbers, updater=self.updater, loop=self.loop)

    @property
    def needs_disk(self) -> bool:
        return self.saved == "disk" or self.weights == "disk" or self.states != "host"


@dataclass
class Run:
    """A model with its optimizers in a loop, and all that can be seen of it."""

    cell: Cell
    model: Any
    optimizers: list[Optimizer]
    seen: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    @functools.cached_property
    def start(self) -> dict[str, Any]:
        return copy.deepcopy(self.model.state_dict())

    def reset(self) -> None:
        self.model.load_state_dict(self.start)
        self.model.train()
        self.model.zero_grad()
        self.steps = 0
        self.seen = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def note(self, name: str, value: Tensor | None) -> None:
        self.seen[f"{name} ({len(self.seen)})"] = (
            torch.empty(0) if value is None else value.detach().clone()
        )

    def loss(self, i: int, *, other: bool = False) -> Tensor:
        """A forward; of the other output, if so."""
        torch.manual_seed(i)
        x, y = data(self.cell.model, i, next(self.model.parameters()).dtype)
        autocast = self.cell.numbers == "autocast"
        with torch.autocast("cpu", BF16) if autocast else contextlib.nullcontext():
            loss, prediction = self.model(x, y)
        self.note("loss", loss)
        self.note("prediction", prediction)
        return prediction.float().square().sum() if other else loss

    def backward(self, *losses: Tensor, more: bool = False, retain: bool = False) -> None:
        """`more`: another one comes before the step."""
        streamed = more and self.cell.in_backward and inside.is_streamed(self.model)
        with accumulate(self.model) if streamed else contextlib.nullcontext():
            for loss in losses:
                loss.backward(retain_graph=retain)
        self.note("drawn", torch.rand(2))  # goes on where the forward has left off
        self._settle()

    def _settle(self) -> None:
        """Behind what works in the memory of residents, where the user looks."""
        if inside.is_streamed(self.model) and inside.residents(self.model):
            adversary.await_compute(self.model)

    def step(self) -> None:
        """The optimizers' steps; buckets of a model whose buckets move do."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        self._settle()
        if self.cell.weights == "moving" and inside.is_streamed(self.model):
            names = list(inside.buckets(self.model))
            inside.want(self.model, *names[self.steps % 3 :: 2])

    def zero(self, none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=none)

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are trained."""
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def look(self) -> None:
        for name, value in self.model.state_dict().items():
            self.note(name, value)
        for name, param in self.params():
            if not self.cell.in_backward:
                self.note(f"{name}.grad", param.grad)
        for i, optimizer in enumerate(self.optimizers):
            for key, state in optimizer.state_dict()["state"].items():
                for name, value in sorted(state.items()):
                    self.note(f"{i}.{key}.{name}", torch.as_tensor(value))


def steps(run: Run, count: int = 3) -> Iterator[int]:
    """Usual steps; after each there is its number."""
    for i in range(count):
        run.zero()
        run.backward(run.loss(i))
        run.step()
        yield i


def once(run: Run) -> None:
    for _ in steps(run):
        pass


def zeros(run: Run) -> None:
    """Gradients are kept, as zeros."""
    for i in range(3):
        run.backward(run.loss(i))
        run.step()
        run.zero(none=i == 1)


def accumulated(run: Run) -> None:
    for i in range(2):
        for k in range(3):
            run.backward(run.loss(3 * i + k) / 3, more=k < 2)
        run.step()
        run.zero()


def clipped(run: Run) -> None:
    """At last by two factors, on top of what an earlier step has scaled; once with a hook."""
    params = [param for _, param in run.params()]
    for i in range(4):
        run.zero() if i < 3 else None
        handle = params[-1].register_hook(lambda gradient: gradient * 2) if i == 1 else None
        run.backward(run.loss(2 * i), more=True)
        run.backward(run.loss(2 * i + 1))
        run.note("norm", nn.utils.clip_grad_norm_(params, (1e-3, 1e3, 1e-2, 0.1)[i]))
        if i == 3:
            run.note("norm of some", nn.utils.clip_grad_norm_(params[::2], 1e-3))
        run.step()
        if handle is not None:
            handle.remove()


def evaluated(run: Run) -> None:
    for i in range(3):
        run.zero()
        loss = run.loss(i)
        if i == 1:
            with torch.no_grad():
                run.loss(7)
        run.backward(loss)
        run.step()
        run.model.eval()
        with torch.inference_mode():
            run.loss(8)
            run.loss(9)
        run.model.train()


def scheduled(run: Run) -> None:
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for i in steps(run):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate / (2 + i)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def saved(run: Run) -> None:
    """The state dicts go through a file and back."""
    for _ in steps(run):
        file = io.BytesIO()
        torch.save((run.model.state_dict(), [o.state_dict() for o in run.optimizers]), file)
        file.seek(0)
        weights, states = torch.load(file)
        run.model.load_state_dict(weights)
        for optimizer, state in zip(run.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def lent(run: Run) -> None:
    """Between steps the memory is free for others; all parameters are seen meanwhile."""
    for _ in steps(run):
        streamed = inside.is_streamed(run.model)
        with released(run.model) if streamed else contextlib.nullcontext():
            full = full_parameters(run.model) if streamed else run.model.named_parameters()
            for name, value in sorted(full, key=lambda pair: pair[0]):
                run.note(name, value)


def exchanged(run: Run) -> None:
    """Data behind a forward, whose backward has the old one; between two steps for one backward
    states, groups, and the strides of a gradient."""
    groups = run.optimizers[0].param_groups
    for i in range(5):
        run.zero()
        loss = run.loss(i)
        param, *_ = groups[0]["params"]
        if i == 4:
            param.data = param.data * 2
        run.backward(loss)
        run.step()
        state = run.optimizers[0].state[param]
        for name, value in state.items() if i == 0 else ():
            state[name] = value + 5 if name == "step" else torch.ones_like(value)
        if i in (1, 3):  # there and back
            matrices, vectors = groups[0]["params"], groups[-1]["params"]
            matrices[0], vectors[0] = vectors[0], matrices[0]
        if i == 2:
            weight = run.model.layers[1].up.weight
            gradient = None if weight.grad is None else weight.grad.t().contiguous().t()
            weight.grad = gradient
        run.step()


def swapped(run: Run) -> None:
    """Parameters exchange their data, one with itself."""
    first, second, *_ = (layer.up for layer in run.model.layers)
    for i in steps(run):
        if i == 1:
            first.weight.data = first.weight.data.t()
        else:
            p, q = (first.bias, second.bias) if i else (first.weight, second.weight)
            p.data, q.data = q.data, p.data


def remade(run: Run) -> None:
    """All get other memory, by another dtype and back, with what was there, and one by itself; a
    parameter with a hook has a gate of its own."""
    weight = run.model.layers[1].up.weight
    dtype, handles = weight.dtype, []
    if not run.cell.in_backward and weight.requires_grad:
        handles = [weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))]
    for i in steps(run, 4):
        if i == 0:
            run.model.double().to(dtype)
        elif i == 1:  # as around an evaluation in half precision
            before = [each.data for each in (*run.model.parameters(), *run.model.buffers())]
            run.model.half()
            for each in (*run.model.parameters(), *run.model.buffers()):
                each.data = before.pop(0)
        elif i == 2:
            with torch.no_grad():
                weight.set_(torch.full_like(weight, 0.1))
        else:
            new = nn.Parameter(torch.full_like(weight, 0.1), requires_grad=weight.requires_grad)
            torch.utils.swap_tensors(weight, new)
    for handle in handles:
        handle.remove()


def edited(run: Run) -> None:
    """Parameters and states are changed between steps."""
    for i in steps(run, 4):
        for k, (_, param) in enumerate(run.params()):
            with torch.no_grad():
                if k % 4 == i:
                    param.mul_(0.75)
                elif k % 4 == i + 1:
                    param.data = param.data * 1.25
            for optimizer in run.optimizers:
                for state in [optimizer.state[param]] if param in optimizer.state else []:
                    for name in state.keys() - {"step"} if k % 4 == i else ():
                        state[name].mul_(0.5)


def retained(run: Run) -> None:
    """Two backwards of one forward, the second behind another one."""
    for i in range(2):
        run.zero()
        loss = run.loss(i)
        run.backward(loss, retain=True)
        run.backward(run.loss(5 + i))
        run.backward(loss)
        run.step()


def crossed(run: Run) -> None:
    """Backwards in the order of the forwards, and then in the other one; one never comes."""
    for i in range(2):
        run.zero()
        first = run.loss(3 * i)
        run.loss(3 * i + 1)
        gc.collect()
        second = run.loss(3 * i + 2)
        run.backward(*((first, second) if i else (second, first)))
        run.step()


def other_output(run: Run) -> None:
    """The gradient is that of another output than a plan expects."""
    for i in range(3):
        run.zero()
        run.backward(run.loss(i, other=i != 1) * 1e-3)
        run.step()


def looked_at(run: Run) -> None:
    """Gradients are read, replaced, taken away and clipped before the step, and read after it."""
    for i in range(3):
        run.zero()
        run.backward(run.loss(i))
        for k, (name, param) in enumerate(run.params()):
            if param.grad is None:
                continue
            run.note(f"{name}.grad", param.grad)
            if k % 5 == i:
                param.grad.mul_(torch.full_like(param.grad, 0.5))
            elif k % 5 == i + 1:
                param.grad = torch.ones_like(param.grad)
            elif k % 5 == i + 2:
                param.grad = None
        nn.utils.clip_grad_value_(run.model.parameters(), 1e-2)
        run.step()
        for optimizer in run.optimizers:  # what the step leaves alone
            for state in [state for p, state in optimizer.state.items() if p.grad is None]:
                for value in state.values():
                    value.mul_(1 if value.dim() == 0 else 0.5)
        for name, param in run.params():
            run.note(name, param)
            run.note(f"{name}.grad", param.grad)


LOOPS: dict[str, Callable[[Run], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(once, zeros, accumulated, clipped, evaluated, scheduled, saved, edited),
        *(retained, crossed, other_output, looked_at, lent, exchanged, swapped, remade),
    )
}
OF_SEVERAL = ("clipped", "retained", "crossed", "looked at")  # what no update in the backward has


def plain(cell: Cell) -> Any:
    torch.manual_seed(0)
    model = Net(cell.model)
    return model.to(BF16) if cell.numbers.startswith("rounded") else model


def build(cell: Cell, folder: Path | None = None) -> Run:
    model = plain(cell)
    made = optimizers(cell.optimizer, model)
    options = {**NUMBERS[cell.numbers], **SAVED[cell.saved], **SLOTS[cell.slots]}
    choice = options.pop("choice", None)
    if cell.needs_disk:
        options["disk"] = folder
    if cell.weights == "disk":
        options["disk_weights"] = True
    if cell.in_backward:
        (options["optimizer"],) = made
    size = sum(param.nbytes for param in model.parameters())
    options["resident"] = {"resident": "all", "some resident": size, "moving": "auto"}.get(
        cell.weights, 0
    )
    megacompile(model, device="cpu", lowering="eager", progress=False, **options)
    if choice is not None:
        inside.choose(model, **choice)
    if cell.states == "some on disk":
        inside.want(model, *inside.residents(model), on_disk=list(inside.buckets(model))[::2])
    return Run(cell, model, made)


def trained(run: Run) -> dict[str, Tensor]:
    """What is seen of a loop from the start."""
    run.reset()
    LOOPS[run.cell.loop](run)
    run.look()
    return run.seen


def on(run: Run, loop: str) -> Run:
    run.cell = replace(run.cell, loop=loop)
    return run


@functools.cache
def _alike(cell: Cell) -> Run:
    run = Run(cell, plain(cell), []) if cell.is_exact else build(cell)
    if cell.is_exact:
        run.optimizers = optimizers(cell.optimizer, run.model)
    run.start  # noqa: B018
    return run


@functools.cache
def expected(cell: Cell) -> dict[str, Tensor]:
    return trained(on(_alike(replace(cell.alike, loop="once")), cell.loop))


@contextlib.contextmanager
def adversarial(run: Run, seed: int) -> Iterator[None]:
    """For its duration the device and the disk of a model do what they may, by a seed."""
    device = inside.machine(run.model).streams
    assert isinstance(device, adversary.Adversary)
    device.policy = adversary.Random(seed)
    with adversary.adversarial(), disks.harsh(random.Random(seed)):
        yield
