"""Batch norms: their statistics are changed once a step, by whichever kernel."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import compat, megacompile, schedules
from megacompile.ir import ops
from tests.zoo import assert_close, assert_same, twins

cudnn_batch_norm: Any = torch.cudnn_batch_norm


class Norm(nn.BatchNorm2d):
    """Calls cuDNN's operator by itself, as torch does on a GPU: here Inductor has code for it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        statistics = self.running_mean, self.running_var
        y: Tensor = cudnn_batch_norm(x, self.weight, self.bias, *statistics, True, 0.1, 1e-5)[0]
        return y


def net(norm: type[nn.Module]) -> nn.Module:
    """(4, 4, 6, 6) -> (4, 4, 6, 6)"""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers)


def train(model: nn.Module, device: str = "cpu") -> list[Tensor]:
    """The outputs of three steps with SGD and of a call in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(4, 4, 6, 6, generator=generator).to(device)
        if k == 3:
            model.eval()
        outputs.append(model(x))
        if k < 3:
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [output.detach() for output in outputs]


@pytest.mark.skipif(not compat.has_cpp_compiler(), reason="no C++ compiler here")
def test_statistics_of_cudnns_operator_are_changed() -> None:
    options: dict[str, Any] = {"activations": "recompute", "progress": False}
    plain = net(nn.BatchNorm2d)
    streamed = megacompile(net(Norm), device="cpu", lowering="inductor", **options)
    for a, b in zip(train(plain), train(streamed), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert_close(plain, streamed, 1e-4)
    for name, statistic in plain.named_buffers():
        if "running" in name:
            assert torch.allclose(statistic, streamed.get_buffer(name), atol=1e-5), name


def test_batch_norm_here_is_bitwise() -> None:
    plain, streamed = twins(net(nn.BatchNorm2d))
    assert all(map(torch.equal, train(plain), train(streamed)))
    assert_same(plain, streamed)


class Pair(nn.Module):
    """Gives what two stages of it compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = net(nn.BatchNorm2d)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.layers[1](self.layers[0](x))
        return half, self.layers[2](half)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_no_backward_takes_statistics(lowering: str) -> None:
    """So no copy of them is made, and a backward for other outputs than was guessed is right."""
    torch.manual_seed(0)
    plain = Pair()
    streamed: Any = copy.deepcopy(plain)
    megacompile(streamed, device="cpu", lowering=lowering, progress=False)
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for which in (1, 1, 0, 1):
            generator = torch.Generator().manual_seed(which)
            model(torch.randn(4, 4, 6, 6, generator=generator))[which].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(
        plain.state_dict().items(), streamed.state_dict().values(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5), name
    copied = [ops.nodes_of(s.forward, ops.snapshot) for s in schedules(streamed)]
    changed = [ops.nodes_of(s.forward, ops.assign) for s in schedules(streamed)]
    assert len(changed[0]) == 9  # three of each layer
    # torch's operator in one piece takes running means and variances, whether it needs them or not
    assert len(copied[0]) == (0 if lowering == "inductor" else 6)


@pytest.fixture
def _exact() -> Iterator[None]:
    """No TF32, and algorithms that add in one order."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_on_the_gpu(activations: str, lowering: str) -> None:
    plain = net(nn.BatchNorm2d).cuda()
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"activations": activations, "lowering": lowering}
    streamed = megacompile(model, device="cuda", resident=0, **options)
    for a, b in zip(train(plain, "cuda"), train(streamed, "cuda"), strict=True):
        assert torch.equal(a, b) if lowering == "eager" else torch.allclose(a, b, atol=1e-4)
    for name, statistic in plain.named_buffers():
        other = streamed.get_buffer(name)
        if lowering == "eager":
            assert torch.equal(statistic, other), name
        assert torch.allclose(statistic.float(), other.float(), atol=1e-4), name


def test_an_output_that_nobody_reads_changes_statistics_too() -> None:
    """Of the norm: a forward that is run for its statistics."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.norm(y)
            return F.relu(y).sum()

    torch.manual_seed(0)
    plain, streamed = twins(Aside())
    for model in (plain, streamed):
        model(torch.linspace(-1, 1, 12).reshape(3, 4)).backward()
    assert_same(plain, streamed)


class SomeEager(nn.Module):
    """(3, 4) -> (3, 4)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, eager: bool) -> Tensor:
        return uncaptured(self, x) if eager else self.plainly(x)

    def plainly(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x)).relu()
        return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncaptured(model: SomeEager, x: Tensor) -> Tensor:
    return model.plainly(x)


@pytest.mark.filterwarnings("ignore:megacompile")  # one is not captured
@pytest.mark.parametrize("first_is_eager", [True, False])
def test_captured_and_eager_forwards_before_one_backward(first_is_eager: bool) -> None:
    """The eager one has saved the statistics, and the captured one counts no version of them."""
    torch.manual_seed(0)
    plain = SomeEager()
    streamed = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    x = torch.randn(3, 4)
    for model in (plain, streamed):
        outputs = [model(x, eager) for eager in (first_is_eager, not first_is_eager)]
        (outputs[0].square() + outputs[1]).mean().backward()
    assert_same(plain, streamed)
    statistics = (plain.norm.running_mean, streamed.norm.running_mean)
    assert len({value._version for value in statistics if value is not None}) == 1
