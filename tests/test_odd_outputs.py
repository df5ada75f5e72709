"""Outputs whose elements share memory, complex ones, and scalars that are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.ir.tensors import TensorMeta
from tests import inside

Function = Callable[[Tensor], Any]

OUTPUTS: dict[str, Function] = {
    "unfold": lambda y: y.unfold(1, 4, 2),
    "as_strided": lambda y: y.as_strided((3, 3, 2), (8, 2, 1)),
    "expand": lambda y: y.mean(0, keepdim=True).expand(5, -1),
    "expand beside": lambda y: (y, y.sum(0).expand_as(y)),
    "meshgrid": lambda y: torch.meshgrid(y[0], y[1], indexing="ij"),
    "complex": lambda y: torch.fft.rfft(y),
    "complex beside": lambda y: (torch.fft.rfft(y), y.tanh()),
    "conj": lambda y: torch.complex(y[:, :4], y[:, 4:]).conj(),
    "transposed": lambda y: y.t(),
}
REDUCED: dict[str, Function] = {
    "sum": lambda y: y.square().mean().sum(0),
    "mean": lambda y: y.square().mean().mean(-1),
    "amax": lambda y: y.square().mean().amax(0),
    "logsumexp": lambda y: y.square().mean().logsumexp(0),
}


class Applies(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Function, *, graph_break: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.graph_break = graph_break

    def forward(self, x: Tensor) -> Any:
        found = self.function(self.linear(x))
        if self.graph_break:
            torch._dynamo.graph_break()
            return torch.view_as_real(found).tanh() if found.is_complex() else found.tanh()
        return found


def weighed(found: Any) -> Tensor:
    """A loss that gives each element another gradient."""
    total = torch.zeros(())
    for each in found if isinstance(found, tuple) else (found,):
        real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        weights = torch.arange(1.0, real.numel() + 1).reshape(real.shape)
        total = total + (real * weights).tanh().sum()
    return total


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    weighed(model(x)).backward()
    return [x.grad, *(p.grad for p in model.linear.parameters())]  # type: ignore[list-item, union-attr]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", [*OUTPUTS, *REDUCED])
def test_gradients_are_the_plain_ones(name: str, activations: str) -> None:
    torch.manual_seed(0)
    plain = Applies({**OUTPUTS, **REDUCED}[name])
    ours = Applies(plain.function)
    ours.load_state_dict(plain.state_dict())
    options: dict[str, Any] = {"gpu_memory": "1GiB", "resident": 0, "activations": activations}
    ours = megacompile(ours, device="cpu", lowering="eager", **options)
    for want, got in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.equal(want, got)
    assert inside.streamed(ours).graphs, "nothing was captured"


@pytest.mark.parametrize("name", ["unfold", "expand", "complex"])
def test_across_a_graph_break(name: str) -> None:
    torch.manual_seed(0)
    plain = Applies(OUTPUTS[name], graph_break=True)
    ours = Applies(plain.function, graph_break=True)
    ours.load_state_dict(plain.state_dict())
    ours = megacompile(ours, device="cpu", lowering="eager")
    for want, got in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.equal(want, got)
    assert len(inside.streamed(ours).graphs) == 2


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_an_expanded_output(lowering: str) -> None:
    """As of a policy that has one deviation for all."""
    torch.manual_seed(0)
    plain = Applies(OUTPUTS["expand beside"])
    ours = Applies(plain.function)
    ours.load_state_dict(plain.state_dict())
    ours = megacompile(ours, device="cpu", lowering=lowering)
    for want, got in zip(gradients(plain), gradients(ours), strict=True):
        torch.testing.assert_close(want, got)


def test_metas_that_overlap() -> None:
    def meta(shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorMeta:
        return TensorMeta(shape, torch.float32, stride)

    assert meta((2, 3), (0, 1)).overlaps_itself
    assert meta((3, 4), (2, 1)).overlaps_itself
    assert not meta((3, 4), (1, 3)).overlaps_itself
    assert not meta((3, 4), (8, 1)).overlaps_itself, "rows of a larger one"
    assert not meta((1, 4), (0, 1)).overlaps_itself, "one row"
    assert not meta((), ()).overlaps_itself
    assert meta((2, 3, 4), (0, 1, 3)).contiguous().stride == (12, 4, 1)
