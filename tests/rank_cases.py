"""The modes that ranks train in, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Muon, Optimizer

from tests.rank_modes import DISK, HERE, LR, Mode
from tests.rank_nets import Adapted, Convolutions, Frozen, Odd, Tied, Wide
from tests.test_lion import Lion

NARROW = {"state_dtype": "int8"}
ROUGH = 0.05  # bfloat16, or states in 8 bits whose blocks begin elsewhere


class Averaging(Optimizer):
    """As a package of somebody else has it: plain Python, on tensors of any kind."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                average: Tensor = state["average"]
                average.lerp_(param.grad, 0.1)
                param.add_(average.sign() * average.abs().sqrt(), alpha=-group["lr"])


def _trained(model: nn.Module, *, matrices: bool = False) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and (p.dim() == 2 or not matrices)]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(_trained(model), lr=0.1, momentum=0.9)


def lion(model: nn.Module) -> Optimizer:
    return Lion(_trained(model), lr=1e-3, weight_decay=0.1)


def muon(model: nn.Module) -> Optimizer:
    return Muon(_trained(model, matrices=True), lr=LR)


def adagrad(model: nn.Module) -> Optimizer:
    """It has states before it steps."""
    return Adagrad(_trained(model), lr=LR)


def averaging(model: nn.Module) -> Optimizer:
    return Averaging(_trained(model))


TWO: dict[str, Mode] = {
    "exact": Mode(decay=0.9),
    "exact, again": Mode(decay=0.9),
    "in the backward": Mode(in_backward=True),
    "8 bits": Mode(Wide, NARROW, tolerance=ROUGH),
    "8 bits, in the backward, on a disk": Mode(
        Wide, {**NARROW, "disk": DISK}, in_backward=True, tolerance=ROUGH
    ),
    "resident in one, in the backward": Mode(
        Tied, {"resident": HERE, "lookahead": 1}, in_backward=True
    ),
    "states on a disk": Mode(options={"disk": DISK}),
    "frozen": Mode(Frozen),
    "adapters": Mode(Adapted),
    "odd shapes, accumulating": Mode(Odd, micro=2),
    "muon": Mode(optimizer=muon, tolerance=ROUGH),
    "somebody's optimizer": Mode(optimizer=averaging, dtype=torch.float64, tolerance=1e-12),
}

MORE: dict[str, Mode] = {  # `make thorough`
    "float32 states": Mode(
        options={"state_dtype": torch.float32}, dtype=torch.bfloat16, tolerance=ROUGH
    ),
    "states on a disk, in the backward": Mode(options={"disk": DISK}, in_backward=True),
    "8 bits, in the backward": Mode(Wide, NARROW, in_backward=True, tolerance=ROUGH),
    "adapters, in the backward": Mode(Adapted, in_backward=True),
    "compute_dtype": Mode(options={"compute_dtype": torch.bfloat16}, tolerance=ROUGH),
    "grad_dtype": Mode(options={"grad_dtype": torch.bfloat16}, tolerance=ROUGH),
    "accumulating": Mode(micro=3),
    "accumulating, in the backward": Mode(micro=3, in_backward=True),
    "keep": Mode(options={"activations": "keep"}),
    "recompute": Mode(options={"activations": "recompute"}),
    "offload": Mode(options={"activations": "offload"}),
    "tied": Mode(Tied, dtype=torch.float64, tolerance=1e-12),
    "tied, in the backward": Mode(Tied, in_backward=True),
    "odd shapes, in the backward": Mode(Odd, in_backward=True),
    "channels_last": Mode(Convolutions),
    "resident": Mode(options={"resident": "all"}),
    "resident, in the backward": Mode(options={"resident": "all"}, in_backward=True),
    "resident in one": Mode(Tied, options={"resident": HERE}),
    "resident in one, accumulating, in the backward": Mode(
        Odd, {"resident": HERE}, micro=2, in_backward=True
    ),
    "resident in one, compute_dtype, in the backward": Mode(
        options={"resident": HERE, "compute_dtype": torch.bfloat16},
        in_backward=True,
        tolerance=ROUGH,
    ),
    "resident in one, compiled, in the backward": Mode(
        options={"resident": HERE, "lowering": "inductor"},
        in_backward=True,
        dtype=torch.float64,
        tolerance=1e-12,
    ),
    "sgd": Mode(optimizer=sgd),
    "lion": Mode(optimizer=lion, dtype=torch.float64, tolerance=1e-12),
    "adagrad": Mode(optimizer=adagrad),
    "compiled": Mode(options={"lowering": "inductor"}, dtype=torch.float64, tolerance=1e-12),
    "compiled, in the backward": Mode(
        options={"lowering": "inductor"}, in_backward=True, dtype=torch.float64, tolerance=1e-12
    ),
    "compiled, 8 bits": Mode(Wide, {**NARROW, "lowering": "inductor"}, tolerance=ROUGH),
    "compiled, odd shapes, accumulating": Mode(
        Odd, {"lowering": "inductor"}, micro=2, tolerance=1e-5
    ),
}

FOUR: dict[str, Mode] = {
    "exact": Mode(),
    "odd shapes": Mode(Odd),
    "2 x 2": Mode(),
}

REPLICATED: dict[str, Mode] = {
    "2 x 2, exact": Mode(micro=2, marks=True),
    "2 x 2, exact, again": Mode(micro=2, marks=True),
    "2 x 2, in the backward": Mode(micro=2, in_backward=True),
    "2 x 2, in the backward, again": Mode(micro=2, in_backward=True),
    "2 x 2, odd shapes, resident": Mode(Odd, {"resident": "all"}, micro=3, marks=True),
    "2 x 2, 8 bits, resident, in the backward": Mode(
        Wide, {**NARROW, "resident": "all"}, micro=2, in_backward=True, tolerance=ROUGH
    ),
    "2 x 2, resident in one, in the backward": Mode(
        Tied,
        {"resident": HERE, "lookahead": 1},
        dtype=torch.float64,
        micro=2,
        in_backward=True,
        tolerance=1e-12,
    ),
    "2 x 2, adapters, in the backward": Mode(Adapted, micro=2, in_backward=True),
}

MORE_REPLICATED: dict[str, Mode] = {  # `make thorough`
    "2 x 2, compiled": Mode(
        options={"lowering": "inductor"},
        dtype=torch.float64,
        micro=2,
        marks=True,
        tolerance=1e-12,
    ),
    "2 x 2, compiled, in the backward": Mode(
        options={"lowering": "inductor"},
        dtype=torch.float64,
        micro=2,
        in_backward=True,
        tolerance=1e-12,
    ),
    "2 x 2, states on a disk": Mode(options={"disk": DISK}, micro=2, marks=True),
    "2 x 2, states on a disk, in the backward": Mode(
        options={"disk": DISK}, micro=2, in_backward=True
    ),
    "2 x 2, channels_last": Mode(Convolutions, micro=2, marks=True),
    "2 x 2, odd shapes, unmarked": Mode(Odd, micro=2),
    "2 x 2, frozen": Mode(Frozen, micro=2, marks=True),
    "2 x 2, adapters": Mode(Adapted, micro=2, marks=True),
}

ON_GPUS: dict[str, Mode] = {  # of two: each way by which parts come and gradients go
    "exact": Mode(decay=0.9),
    "in the backward": Mode(in_backward=True),
    "resident": Mode(options={"resident": "all"}),
    "8 bits, in the backward, on a disk": TWO["8 bits, in the backward, on a disk"],
    "adapters": Mode(Adapted),
    "odd shapes, accumulating": Mode(Odd, micro=2),
    "compiled": Mode(options={"lowering": "inductor"}, dtype=torch.float64, tolerance=1e-12),
}

MODES_OF_FOUR: dict[str, Mode] = {  # with those of `FOUR`, each at least once
    "8 bits, on a disk": Mode(Wide, {**NARROW, "disk": DISK}, tolerance=ROUGH),
    "states on a disk, in the backward": Mode(options={"disk": DISK}, in_backward=True),
    "adapters": Mode(Adapted),
    "frozen": Mode(Frozen),
}
