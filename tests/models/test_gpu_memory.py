"""Device memory that is really too small, and what a step really takes of it."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import megacompile, schedules
from megacompile.errors import DeviceMemoryError
from tests import inside
from tests.device_bytes import cublas_bytes, device_bytes
from tests.training import losses_of
from tests.zoo import Tower

pytestmark = pytest.mark.gpu

MiB = 2**20


@pytest.fixture(autouse=True)
def _no_cap() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def cap(size_bytes: float) -> None:
    """Let this process have no more device memory than that."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total))


def wide() -> Tower:
    """Layers that save much more than they weigh: 128 MiB for 4096 rows, with dropout."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))
        for _ in range(16)
    )
    return Tower(layers, lambda layer, x: x + layer(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    def given() -> Iterator[dict[str, torch.Tensor]]:
        for i in steps:
            torch.manual_seed(i)  # for dropout, too
            yield {"x": torch.randn(4096, 512, device="cuda")}

    return losses_of(model, optimizer, given())


def test_a_cap_that_is_a_twentieth_too_small() -> None:
    """The plan fills what it may; then a twentieth of that is taken away."""
    plain = wide().cuda()
    model = copy.deepcopy(plain)
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), range(5))
    del plain
    gc.collect()
    base = torch.cuda.memory_allocated()
    model = megacompile(model, lowering="eager", gpu_memory=1000 * MiB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    got = train(model, optimizer, range(2))
    torch.cuda.reset_peak_memory_stats()
    got += train(model, optimizer, range(2, 3))
    peak = torch.cuda.max_memory_allocated()
    assert peak > base + 700 * MiB, "the plan has not filled what it may"
    cap(base + 0.95 * (peak - base))
    with pytest.warns(UserWarning, match="repeated"):
        got += train(model, optimizer, range(3, 5))
    assert got == want


def test_a_cap_that_nothing_satisfies() -> None:
    """Less than what a single layer saves."""
    base = torch.cuda.memory_allocated()
    model = megacompile(wide(), lowering="eager", gpu_memory="1GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    cap(base + 100 * MiB)
    with warnings.catch_warnings(), pytest.raises(DeviceMemoryError):
        warnings.simplefilter("ignore")
        train(model, optimizer, range(2, 3))


class Adapted(nn.Module):
    """A frozen base and adapters of rank 8, gated: what is as wide as the MLP is a sum of two."""

    def __init__(self, layers: int = 3, width: int = 512, wide: int = 4096) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"up": (width, wide), "gate": (width, wide), "down": (wide, width)}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.ModuleList([nn.Linear(a, b), nn.Linear(a, 8), nn.Linear(8, b)])
                    for name, (a, b) in shapes.items()
                }
            )
            for _ in range(layers)
        )
        for layer in self.layers:
            for base, *_ in layer.values():  # type: ignore[operator]
                base.requires_grad_(False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def run(name: str, x: Tensor, layer: Any = layer) -> Tensor:
                base, down, up = layer[name]
                return base(x) + 0.5 * up(down(x))

            x = x + run("down", F.silu(run("gate", x)) * run("up", x))
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("lowering", "tiles", "activations"),
    [
        *((lowering, tiles, "recompute") for lowering in ("eager", "inductor") for tiles in (1, 8)),
        ("eager", 1, "offload"),
    ],
)
def test_a_step_takes_what_its_plan_says(lowering: str, tiles: int, activations: str) -> None:
    """Without cuBLAS's workspaces, and within what single calls take: a value that is as wide as
    the MLP takes 256 MiB, the sum of its rows 1 MiB for each of 132 multiprocessors."""
    base = device_bytes()
    options: dict[str, Any] = {"resident": 0, "device_update": 0, "activations": activations}
    model = megacompile(Adapted(), lowering=lowering, tiles=tiles, **options)
    x = torch.randn(32768, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        model.zero_grad()
    taken = torch.cuda.max_memory_allocated() - base - cublas_bytes()
    planned = inside.planned_bytes(schedules(model)[-1], fused=lowering == "inductor")
    assert 0.8 * planned < taken < planned + 150 * MiB
