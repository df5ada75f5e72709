"""Results have the strides that what takes them was traced for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megacompile.ir.tensors import TensorMeta
from megacompile.passes.stages.strides import with_strides


def test_results_have_the_strides_that_they_were_traced_with() -> None:
    """Inductor pads matrix products, and gives a part of what it has padded. Strides of what has
    one element do not matter."""
    x = torch.arange(12.0).reshape(3, 4)
    traced = [x * 2, (x * 3).t(), x.sum(0, keepdim=True), torch.ones(1, 4)]
    metas = [*map(TensorMeta.of, traced), None]
    padded = [F.pad(t, (0, 4))[:, : t.shape[1]] for t in traced[:2]]
    given = [*padded, traced[2], torch.empty_strided((1, 4), (64, 1)).fill_(1), None]
    found = with_strides(lambda: given, metas)()
    for got, before, want in zip(found, given, traced, strict=False):
        assert got is not None and before is not None and torch.equal(got, want)
        assert (got is before) == (before.numel() == 4)
        assert got.stride() == want.stride() or got.numel() == 4
    assert found[4] is None


def test_strides_that_are_always_right_are_looked_at_once() -> None:
    right, wrong = torch.zeros(2, 3), torch.zeros(3, 2).t()
    for settled in (False, True):
        results = [right, wrong]
        run = with_strides(lambda: results, [TensorMeta.of(right)] * 2, settled=settled)  # noqa: B023
        assert [each.stride() for each in run()] == [(3, 1)] * 2
        assert [each.stride() for each in run()] == [(3, 1)] * 2, "what is wrong each time"
        results[0] = wrong
        assert run()[0].stride() == ((1, 2) if settled else (3, 1))
