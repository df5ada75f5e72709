"""Training by ranks that share a model, next to the plain model in the same process.

Every rank trains on micro-batches of its own. The plain model has those of all ranks: it averages
the gradients of what they do at once, as ranks do, so that both are equal in every bit. The models
are small: each gives its loss, and makes its batches.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megacompile import accumulate, megacompile, released
from tests.equality.nets import Applies
from tests.ranks.here import Check, Here, Values, contents, differing, same_in_all, whole
from tests.zoo import Language, Tower

WORDS = 11
WIDTH = 8


class Words(Language):
    """A language model whose parameters have rows that no number of ranks divides."""

    def __init__(self, *, tied: bool = False) -> None:
        inner = [[nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH)] for _ in range(2)]
        layers = (nn.Sequential(*each, nn.LayerNorm(WIDTH)) for each in inner)
        super().__init__(WORDS, WIDTH, layers)
        self.head = nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, WORDS, (2, 5), generator=generator)


def tied() -> Words:
    """Its head is its embedding."""
    return Words(tied=True)


class Frozen(Words):
    """Of some layers nothing is trained, of others only the biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.get_parameter("layers.1.0.weight").requires_grad_(False)


class Adapted(Words):
    """Frozen, with adapters of low rank, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for i, layer in enumerate(self.layers):  # one matrix has fewer rows than there are ranks
            down, up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
            adapter = Applies(lambda m, x: x + m.up(m.down(x)), down=down, up=up)
            self.layers[i] = nn.Sequential(layer, adapter)


class Odd(nn.Module):
    """Parameters of one row, of none, of more dimensions; a gradient that some never get."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(3, 5, WIDTH))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(5))

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        mixed = torch.einsum("bw,rcw->brc", x, self.mix) + self.none.sum()
        return mixed.square().mean()


class Convolutions(Tower):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        layers = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        super().__init__(layers, lambda layer, x: torch.tanh(layer(x)))
        for layer in self.layers:
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 3, 6, 6, generator=generator)


class Wide(Tower):
    """Parameters that are large enough for states in 8 bits."""

    def __init__(self) -> None:
        layers = (nn.Linear(71, 71) for _ in range(3))
        super().__init__(layers, lambda layer, x: x + torch.tanh(layer(x)))

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(8, 71, generator=generator)


STEPS = 3
LR = 0.01
ROUGH = 0.05  # bfloat16, or states in 8 bits whose blocks begin elsewhere
NEAR = 1e-6  # what sums of another order round otherwise: norms of parts, updates in the backward
DISK = object()  # in options: a folder
HERE = object()  # in options: 'all' in the first rank, 0 in the others
NARROW = {"state_dtype": "int8"}
COMPILED = {"lowering": "inductor"}


class Averaging(Optimizer):
    """As a package of somebody else has it: plain Python, on tensors of any kind."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average: Tensor = state["average"]
                average.lerp_(param.grad, 0.1)
                param.add_(average.sign() * average.abs().sqrt(), alpha=-group["lr"])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(trained(model), lr=LR)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(trained(model), lr=0.1, momentum=0.9)


def muon(model: nn.Module) -> Optimizer:
    """It computes with whole matrices."""
    return Muon([p for p in trained(model) if p.dim() == 2], lr=LR)


def adagrad(model: nn.Module) -> Optimizer:
    """It has states before it steps."""
    return Adagrad(trained(model), lr=LR)


def averaging(model: nn.Module) -> Optimizer:
    return Averaging(trained(model))


@dataclass(frozen=True)
class Mode:
    """How a model is trained.

    Attributes:
        net: makes it, always with the same values.
        options: of `megacompile`.
        in_backward: the optimizer is given to `megacompile` as `optimizer=`.
        micro: batches before a step.
        marks: `accumulate()` is around all of them but the last, with a step of its own too.
        clip: the largest norm of all gradients.
        near: what is as near as this, relative to a tensor's norm, is equal; 0: every bit is.
        decay: of the learning rate, each step.
    """

    net: Callable[[], nn.Module] = Words
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    in_backward: bool = False
    micro: int = 1
    marks: bool = False
    dtype: torch.dtype = torch.float32
    clip: float = 0.0
    near: float = 0.0
    decay: float = 1.0

    @property
    def tolerance(self) -> float:
        rounds = self.in_backward or self.clip or "lowering" in self.options
        return max(self.near, NEAR if rounds else 0.0)


def batch(net: Any, step: int, index: int) -> Tensor:
    """A micro-batch: the `index`-th of a step; numbers are in the model's dtype."""
    found: Tensor = net.batch(torch.Generator().manual_seed(1000 * step + index))
    return found.to(next(net.parameters()).dtype) if found.is_floating_point() else found


def made(mode: Mode) -> Any:
    torch.manual_seed(0)
    return mode.net().to(mode.dtype)


def plain(mode: Mode, here: Here) -> Values:
    """Train the plain model; gives this rank's losses too."""
    model = made(mode).to(here.device)
    optimizer = mode.optimizer(model)
    schedule = LambdaLR(optimizer, lambda step: mode.decay**step)
    found: Values = {}
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        for k in range(mode.micro):
            several = []
            for rank in range(here.count):
                model.zero_grad()
                x = batch(model, step, rank * mode.micro + k).to(here.device)
                loss = model(x) / mode.micro
                loss.backward()
                several.append([_as_kept(mode, param.grad) for param in model.parameters()])
                if rank == here.rank:
                    found[f"loss {step}.{k}"] = loss.detach().cpu()
            for param, *grads in zip(model.parameters(), *several, strict=True):
                if grads[0] is not None:
                    mean = functools.reduce(torch.add, grads) / here.count
                    sums[param] = sums[param] + mean if param in sums else mean
        for param, mean in sums.items():
            param.grad = mean.to(param.dtype)
        _step(mode, model, optimizer, f"norm {step}", found)
        schedule.step()
    return found | contents(model, optimizer)


def shared(mode: Mode, here: Here) -> Values:
    """The same of the model that ranks share."""
    model = made(mode)
    optimizer = mode.optimizer(model)
    found: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        stands_for = {DISK: folder, HERE: 0 if here.rank else "all"}
        options: dict[str, Any] = {
            name: next((there for mark, there in stands_for.items() if value is mark), value)
            for name, value in mode.options.items()
        }
        given: dict[str, Any] = {"optimizer": optimizer} if mode.in_backward else {}
        megacompile(model, mesh=here.mesh, device=here.device, **given, **options)
        schedule = LambdaLR(optimizer, lambda step: mode.decay**step)
        for step in range(STEPS):
            for k in range(mode.micro):
                x = batch(model, step, here.rank * mode.micro + k).to(here.device)
                marked = (mode.in_backward or mode.marks) and k < mode.micro - 1
                with accumulate(model) if marked else nullcontext():
                    loss = model(x) / mode.micro
                    loss.backward()
                found[f"loss {step}.{k}"] = loss.detach().cpu()
            _step(mode, model, optimizer, f"norm {step}", found)
            schedule.step()
        # `full_tensor()` would wait for a part of another device
        with released(model) if HERE in mode.options.values() else nullcontext():
            return found | contents(model, optimizer)


def _as_kept(mode: Mode, gradient: Tensor | None) -> Any:
    """In the dtype in which gradients are kept and averaged."""
    return None if gradient is None else gradient.to(mode.options.get("grad_dtype", gradient.dtype))


def _step(mode: Mode, model: nn.Module, optimizer: Optimizer, name: str, found: Values) -> None:
    if mode.clip:
        found[name] = whole(nn.utils.clip_grad_norm_(trained(model), mode.clip))
    optimizer.step()
    optimizer.zero_grad()


def check(mode: Mode) -> Check:

    def as_plain(here: Here) -> None:
        expected = plain(mode, here)
        torch.compiler.reset()
        ours = shared(mode, here)
        near = mode.tolerance if here.count == 2 else max(mode.tolerance, NEAR)
        wrong = differing(ours, expected, near)
        assert not wrong, "\n".join(wrong)
        same_in_all(here, {name: v for name, v in ours.items() if not name.startswith("loss")})

    return as_plain


def checks(modes: Mapping[str, Mode], *, sizes: tuple[int, ...] = ()) -> dict[str, Check]:
    """Of each mode, by all ranks or by a mesh of these sizes."""

    def bound(mode: Mode) -> Check:
        return (lambda here: check(mode)(here.meshed(*sizes))) if sizes else check(mode)

    of = f", {' x '.join(map(str, sizes))}" if sizes else ""
    return {name + of: bound(mode) for name, mode in modes.items()}


EXACT = Mode(clip=0.5, decay=0.9, near=NEAR)
TWO: dict[str, Mode] = {
    "in every bit": Mode(Frozen, decay=0.9, options={"disk": DISK}),
    "8 bits, in the backward, on a disk": Mode(
        Wide, {**NARROW, "disk": DISK}, in_backward=True, near=ROUGH
    ),
    "resident in one, in the backward": Mode(
        tied, {"resident": HERE, "lookahead": 1}, in_backward=True, micro=2
    ),
    "resident adapters, somebody's optimizer": Mode(
        Adapted, {"resident": "all"}, averaging, dtype=torch.float64
    ),
    "odd shapes, accumulating": Mode(Odd, micro=2),
    "grad_dtype": Mode(options={"grad_dtype": torch.bfloat16}, near=NEAR),
    "clipped": Mode(clip=0.5),
}
CODE: dict[str, Mode] = {  # of Inductor
    "compiled": Mode(options=COMPILED, dtype=torch.float64),
    "compiled, resident in one, in the backward": Mode(
        options={"resident": HERE, **COMPILED}, in_backward=True, dtype=torch.float64
    ),
    "compiled, 8 bits": Mode(Wide, {**NARROW, **COMPILED}, near=ROUGH),
    "compiled, odd shapes, accumulating": Mode(Odd, COMPILED, micro=2, dtype=torch.float64),
}
NUMBERS: dict[str, Mode] = {
    "float32 states": Mode(
        options={"state_dtype": torch.float32}, dtype=torch.bfloat16, near=ROUGH
    ),
    "compute_dtype": Mode(options={"compute_dtype": torch.bfloat16}, near=ROUGH),
    "compute_dtype, resident in one, in the backward": Mode(
        options={"resident": HERE, "compute_dtype": torch.bfloat16}, in_backward=True, near=ROUGH
    ),
    "muon": Mode(optimizer=muon, near=ROUGH),
    "adagrad, recomputed": Mode(tied, {"activations": "recompute", "disk": DISK}, adagrad, micro=2),
    "convolutions, offloaded": Mode(  # kernels go by alignment
        Convolutions, {"activations": "offload", "resident": "all"}, sgd, near=1e-5
    ),
}


FOUR: dict[str, Mode] = {
    "exact": EXACT,
    "odd shapes": Mode(Odd),
    "8 bits, on a disk": Mode(Wide, {**NARROW, "disk": DISK}, near=ROUGH),
    "states on a disk, in the backward": Mode(options={"disk": DISK}, in_backward=True),
    "frozen": Mode(Frozen),
}
REPLICATED: dict[str, Mode] = {
    "exact": Mode(micro=2, marks=True, clip=0.5),
    "odd shapes, resident": Mode(Odd, {"resident": "all"}, micro=3, marks=True),
    "8 bits, resident, in the backward": Mode(
        Wide, {**NARROW, "resident": "all"}, micro=2, in_backward=True, near=ROUGH
    ),
    "resident in one, in the backward": Mode(
        tied, {"resident": HERE, "lookahead": 1}, micro=2, in_backward=True, dtype=torch.float64
    ),
    "adapters, in the backward": Mode(Adapted, micro=2, in_backward=True),
}
MORE_REPLICATED: dict[str, Mode] = {
    "compiled": Mode(options=COMPILED, dtype=torch.float64, micro=2, marks=True),
    "compiled, in the backward": Mode(
        options=COMPILED, dtype=torch.float64, micro=2, in_backward=True
    ),
}
THREE_REPLICAS: dict[str, Mode] = {"clipped": Mode(micro=2, clip=0.5, near=NEAR)}
ON_GPUS: dict[str, Mode] = {  # of two: each way by which parts come and gradients go
    "exact": EXACT,
    "in the backward": Mode(in_backward=True),
    "resident": Mode(options={"resident": "all"}, near=NEAR),
    "8 bits, in the backward, on a disk": TWO["8 bits, in the backward, on a disk"],
    "adapters": Mode(Adapted, near=NEAR),
    "odd shapes, accumulating": Mode(Odd, micro=2, near=NEAR),
    "compiled": CODE["compiled"],
}
