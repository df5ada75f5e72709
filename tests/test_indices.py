"""Stages that cannot be traced on zeros: what they compute from them is an index that there is not.

The numbers are compared with the plain model's in every bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat
from megacompile.passes.stages.indices import computes_indices
from tests.zoo import assert_same, equal, step, twins

Code = Callable[[Tensor, Tensor], Tensor]  # of hidden states (3, 5, 8) and a mask (3, 5)


def _last(mask: Tensor) -> Tensor:
    return mask.sum(1) - 1


CODES: dict[str, Code] = {
    "gather": lambda h, m: h.gather(1, _last(m)[:, None, None].expand(-1, 1, 8)),
    "index": lambda h, m: h[torch.arange(3), _last(m)],
    "index_select": lambda h, m: h.index_select(1, _last(m)),
    "cross_entropy": lambda h, m: F.cross_entropy(h[:, 0], _last(m)),
    "divided": lambda h, m: h * (7 // m.sum(1))[:, None, None],
    "inverse": lambda h, m: torch.linalg.inv(
        h.transpose(1, 2) @ h + torch.diag_embed(h[:, 0] ** 2)
    ),
    "cholesky": lambda h, m: torch.linalg.cholesky(h @ h.transpose(1, 2)),
    "scatter": lambda h, m: torch.zeros(3, 9).scatter(1, m.cumsum(1) - 1, h[..., 0]),
}


class Coded(nn.Module):
    """Looks something up in its hidden states."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.Linear(8, 8)
        self.code = code

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.code(self.layer(torch.tanh(self.embed(x))), mask).square().sum()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.filterwarnings("ignore:megacompile. Coded is not scheduled.*side effects")
@pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode and fetches")
def test_code_that_raises_on_zeros(name: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Coded(CODES[name]))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        mask = torch.randint(2, (3, 5), generator=generator)
        mask[:, 0] = 1
        inputs = {"x": torch.randn(3, 5, 4, generator=generator), "mask": mask}
        assert equal(step(plain, inputs), step(streamed, inputs))
        assert_same(plain, streamed)


def test_what_raises_on_the_data_raises() -> None:
    torch.manual_seed(0)
    _, streamed = twins(Coded(CODES["gather"]))
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        streamed(torch.randn(3, 5, 4), torch.zeros(3, 5, dtype=torch.int64))


SAFE: dict[str, Code] = {
    "given": lambda h, m: h.gather(1, m),
    "a view of what is given": lambda h, m: h.gather(1, m.t().contiguous().t()[:, 1:]),
    "padded for the loss": lambda h, m: F.nll_loss(h, F.pad(m, (0, 1), value=-100)[:, 1]),
    "constant": lambda h, m: h[:, torch.arange(3)],
    "no index": lambda h, m: h * m.sum(),
}
UNSAFE: dict[str, Code] = {
    "computed": lambda h, m: h.gather(1, m - 1),
    "a view of what is computed": lambda h, m: h.gather(1, (m - 1).t().t()),
    "among others": lambda h, m: h[torch.arange(3), m.sum(1)],
    "a loss": lambda h, m: F.nll_loss(h, m[:, 0] - 1),
    "a chance": lambda h, m: torch.bernoulli(h / m),
}


@pytest.mark.parametrize("name", [*SAFE, *UNSAFE])
def test_indices_that_are_computed_are_found(name: str) -> None:
    code = {**SAFE, **UNSAFE}[name]
    with compat.fake_mode():
        given = [torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int64)]
        traced = compat.trace(lambda primals, _: code(*primals), given, [], {})
    assert computes_indices(traced.graph) == (name in UNSAFE)
