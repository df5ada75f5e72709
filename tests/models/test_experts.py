"""Experts: their product in every bit, the gradients of those that nobody chose; `sdpa`.

What experts cost, tests/models/test_plan_command.py says. Attention of transformers by `sdpa` is
equal in every bit on the CPU, whatever mask is given.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional

from tests import inside
from tests.draws import drawn
from tests.equality.nets import from_config
from tests.zoo import assert_same, equal, twins

ROWS, EXPERTS, WIDTH, INNER = 64, 4, 32, 48
OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)  # the second expert has no row


@pytest.mark.parametrize(("dtype", "transposed"), [(torch.float32, False), (torch.float16, True)])
def test_the_operator_for_it_is_the_eager_one(dtype: torch.dtype, transposed: bool) -> None:
    """In every bit, and so are its gradients, of which the operator says how they lie."""
    torch.manual_seed(0)
    shape = (EXPERTS, INNER, WIDTH) if transposed else (EXPERTS, WIDTH, INNER)
    x, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(shape, dtype=dtype)
    up = torch.randn(ROWS, INNER, dtype=dtype)
    found = []
    product = torch.ops.megacompile.grouped_mm
    for run in (
        lambda a, b: functional.grouped_mm(a, b, offs=OFFSETS),
        lambda a, b: product(a, b, OFFSETS),
    ):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        result = run(a, b.transpose(-2, -1) if transposed else b)
        result.backward(up)
        found.append((result.detach(), a.grad, b.grad))
    assert all(map(equal, *found))
    view = weight.transpose(-2, -1) if transposed else weight
    torch.library.opcheck(product.default, (x, view, OFFSETS), test_utils="test_faketensor")
    back = torch.ops.megacompile.grouped_mm_backward.default
    torch.library.opcheck(back, (up, x, view, OFFSETS), test_utils="test_faketensor")


def test_stacked_experts_without_tokens_have_zeros() -> None:
    """And host memory: a step may choose any of them, so there is memory for all. In float32 they
    are scheduled, without a warning that all of it runs in eager mode."""
    pytest.importorskip("transformers")
    changes = {"num_local_experts": 8, "_experts_implementation": "grouped_mm"}
    torch.manual_seed(0)
    plain, streamed = twins(from_config("mixtral", **changes, _attn_implementation="eager"))
    ids = torch.tensor([[1, 2, 1, 2]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="megacompile")
        for model in (plain, streamed):
            model(input_ids=ids, labels=ids).loss.backward()
    assert_same(plain, streamed)
    grads = [p.grad for name, p in plain.named_parameters() if ".experts." in name]
    assert sum(not expert.any() for grad in grads if grad is not None for expert in grad) > 0
    for bucket in inside.buckets(streamed).values():
        assert len(bucket.grads) == len(bucket.params)


@pytest.mark.parametrize("kind", drawn(["mistral"], ["qwen2"]))
def test_the_same_bits_with_every_mask(kind: str) -> None:
    """In a window that slides, too."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain, streamed = twins(from_config(kind, _attn_implementation="sdpa"))
    ids = torch.arange(48).view(2, 24) % 64
    ones = torch.ones_like(ids)
    padded = ones.masked_fill(torch.arange(24) < torch.tensor([[5], [0]]), 0)
    for given, mask in {"none": None, "ones": ones, "padded": padded}.items():
        outputs = []
        for each in (plain, streamed):
            each.zero_grad()
            output = each(ids, attention_mask=mask, labels=ids, use_cache=False)
            output.loss.backward()
            outputs.append(output)
        assert torch.equal(outputs[0].logits, outputs[1].logits), given
        assert torch.equal(outputs[0].loss, outputs[1].loss), given
        grouped = kind == "qwen2" and given != "padded"  # plain sums the heads of a group elsewhere
        for a, b in zip(plain.parameters(), streamed.parameters(), strict=True):
            if grouped:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
            else:
                assert torch.equal(a.grad, b.grad), given
