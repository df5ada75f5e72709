"""Functions whose C++ asks what a size is have one program for all sizes, and the plain bits."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.compat import composites
from tests import inside
from tests.zoo import differences, equal, twins

WIDTH = 4


class UNet(nn.Module):
    """Down, and up again to the size that there was."""

    def __init__(self, up: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.last = nn.Conv2d(2 * WIDTH, 3, 3, padding=1)
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x).relu()
        low = self.down(wide).tanh()
        out: Tensor = self.last(torch.cat([wide, self.up(low, wide)], 1))
        return out.square().mean()


def turned(low: Tensor, wide: Tensor) -> Tensor:
    theta = low.mean((2, 3))[:, :3, None].transpose(1, 2) * torch.ones(2, 1)
    grid = F.affine_grid(theta, list(wide.shape), align_corners=False)
    return F.grid_sample(low, grid, align_corners=False)


UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "size": lambda low, wide: F.interpolate(low, size=wide.shape[-2:], mode="bilinear"),
    "scale": lambda low, wide: F.interpolate(low, scale_factor=2),
    "affine": turned,
}
SIZES = [(8, 8), (12, 16), (16, 20), (20, 12), (24, 40), (10, 10)]


def assert_same(model: nn.Module, shapes: Sequence[Sequence[int]]) -> nn.Module:
    """Train the model and its twin on these shapes; gives the twin."""
    streamed: nn.Module
    plain, streamed = twins(model)
    for shape in shapes:
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(*shape)
        losses = [trained(x) for trained in (plain, streamed)]
        for loss in losses:
            loss.backward()
        assert equal(*losses)
    assert differences(plain, streamed) == []
    return streamed


@pytest.mark.parametrize("up", UPS)
def test_a_unet_has_one_program_for_all_sizes(up: str) -> None:
    streamed = assert_same(UNet(UPS[up]), [(2, 3, *size) for size in SIZES])
    assert len(inside.programs(streamed)) == 2


class Summed(nn.Module):
    """A layer, and the means of what several functions make of its result."""

    def __init__(self, layer: nn.Module, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return sum((f(x).square().mean() for f in self.functions), x.new_zeros(()))


def up(**named: object) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, **named)  # type: ignore[arg-type]


def spaced(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return x * torch.linspace(0.5, n - 0.5, n) + torch.linspace(-1, 1, steps=n, dtype=x.dtype)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "1d": (
        lambda: Summed(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            up(scale_factor=2),
            up(scale_factor=1.5, mode="linear", align_corners=True),
            up(scale_factor=3, mode="nearest-exact"),
            lambda x: F.max_pool1d(x, 3, stride=2),
            nn.MaxPool1d(2, return_indices=False),
            spaced,
            F.hardshrink,
            F.softshrink,
        ),
        [(2, WIDTH, n) for n in (8, 12, 17, 20)],
    ),
    "2d": (
        lambda: Summed(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            up(scale_factor=(0.3, 0.7)),  # no products of these are exact
            up(scale_factor=0.5, mode="area"),
            up(scale_factor=1.5, mode="bilinear", recompute_scale_factor=True),
            up(scale_factor=0.5, mode="bicubic", antialias=True),
            up(size=(5, 7), mode="bicubic"),
            lambda x: F.interpolate(
                x.to(memory_format=torch.channels_last), scale_factor=2, mode="bilinear"
            ),
        ),
        [(2, WIDTH, 8, 8), (2, WIDTH, 12, 16), (2, WIDTH, 17, 12), (2, WIDTH, 24, 20)],
    ),
    "3d": (
        lambda: Summed(
            nn.Conv3d(WIDTH, WIDTH, 3, padding=1),
            up(scale_factor=2),
            up(scale_factor=2, mode="trilinear"),
            lambda x: F.affine_grid(x.mean((3, 4))[:, :3, :4], list(x.shape), align_corners=True),
        ),
        [(2, WIDTH, 4, n, n + 1) for n in (4, 6, 9, 10)],
    ),
}


@pytest.mark.parametrize("dims", MODELS)
def test_functions_that_ask_have_one_program(dims: str) -> None:
    make, shapes = MODELS[dims]
    streamed = assert_same(make(), shapes)
    assert len(inside.programs(streamed)) == 2


@pytest.mark.parametrize("how", ["size", "scale"])
def test_the_line_that_asks_is_said(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where nothing is known of what C++ takes apart."""
    monkeypatch.setattr(composites, "_symbolic_composites", contextlib.nullcontext)
    streamed = twins(UNet(UPS[how]))[1]
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO", "megacompile"):
        warnings.simplefilter("always")
        for n in range(8, 28, 2):
            streamed(torch.ones(2, 3, n, n + 4)).backward()
    asked = [m for m in caplog.messages if "its own code" in m]
    assert asked
    assert all("test_asked_sizes.py, line" in m and "F.interpolate(low" in m for m in asked)
    (said,) = (str(w.message) for w in caught if "captured anew" in str(w.message))
    assert "in 8 of its last 8 calls" in said
    assert "F.interpolate(low" in said and "pad to a few sizes" in said
