"""Masks that are known to be causal: found, told to attention, and only those."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.options import Lowering
from megacompile.passes.capture import causal
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.propagate import propagate
from tests.capturing import capture

HEADS, LENGTH, WIDTH = 2, 7, 4
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries (L, 1), keys (1, L) and an input


class Attends(nn.Module):
    """Two attentions under one mask."""

    def __init__(self, mask: Mask, *, keys: int = LENGTH, returns: bool = False) -> None:
        super().__init__()
        self.mask, self.keys, self.returns = mask, keys, returns
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: Tensor) -> Any:  # (batch, HEADS, LENGTH, WIDTH)
        queries = torch.arange(x.shape[-2], device=x.device)[:, None]
        keys = torch.arange(self.keys, device=x.device)[None, :]
        mask = self.mask(queries, keys, given)
        y = self.project(x)[..., : self.keys, :]
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, y, y, mask)
        return (x, mask) if self.returns else x


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, HEADS, LENGTH, WIDTH, generator=generator)
    return x, torch.ones(LENGTH, LENGTH, dtype=torch.bool)


def attentions(model: nn.Module, lowering: Lowering = Lowering.INDUCTOR) -> tuple[list[Any], Any]:
    """(has a mask, is_causal) of each attention after the pass; and its lines."""
    captured = capture(model, *inputs()).capture
    made, lines = use_causal_attention(captured, lowering=lowering)
    made.module.graph.lint()
    found = []
    for node in made.module.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            found.append((mask is not None, node.kwargs.get("is_causal", False)))
    return found, lines


def _packed(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
    """As Hugging Face's 5.23: one document, found by the jumps of positions."""
    positions, same = _documents(q, k)
    batch = torch.arange(3)[:, None, None, None]
    mask = q.new_ones((), dtype=torch.bool) & same
    return (mask & (positions[batch, k[None, None]] <= q)).expand(3, -1, -1, -1)


def _packed_behind(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
    """As its 5.17: the causal mask is one for all of the batch."""
    _, same = _documents(q, k)
    mask = q.new_ones((), dtype=torch.bool) & (k[None, None] <= q[None, None])
    return (mask & same).expand(3, -1, -1, -1)


def _documents(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Positions, and whether a query and a key belong to one document."""
    positions = torch.arange(LENGTH)[None].expand(3, -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    document = jumps.cumsum(-1)
    batch = torch.arange(3)[:, None, None, None]
    same = document[batch, q[None, None]] == document[batch, k[None, None]]
    return positions, same.to(q.device)


CAUSAL: dict[str, Mask] = {
    "<=": lambda q, k, given: k <= q,
    ">=": lambda q, k, given: q >= k,
    "<": lambda q, k, given: k < q + 1,
    ">": lambda q, k, given: q > k - 1,
    "torch.le": lambda q, k, given: torch.le(k, q),
    "by name": lambda q, k, given: torch.le(other=q, input=k),
    "method": lambda q, k, given: k.le(q),
    "tril": lambda q, k, given: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "tril, diagonal": lambda q, k, given: torch.tril(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=0
    ),
    "four dimensions": lambda q, k, given: (k <= q)[None, None].expand(3, HEADS, -1, -1),
    "an ellipsis": lambda q, k, given: (k <= q)[None, ..., :][None, :, :, :],
    "view": lambda q, k, given: (k <= q).view(1, 1, LENGTH, LENGTH).contiguous(),
    "and all": lambda q, k, given: (k <= q) & (k >= 0),
    "and itself": lambda q, k, given: torch.logical_and(k <= q, q >= k),
    "packed": _packed,
    "packed behind": _packed_behind,
}


def _window(q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (k > q - 3)


OTHERS: dict[str, Mask] = {
    "the other way": lambda q, k, given: q <= k,
    "not itself": lambda q, k, given: (k < q) & given,
    "strictly": lambda q, k, given: k < q,
    "one further": lambda q, k, given: k <= q + 1,
    "a window": lambda q, k, given: (k <= q) & (k > q - 3),
    "given": lambda q, k, given: given,
    "with what is given": lambda q, k, given: (k <= q) & given,
    "a diagonal": lambda q, k, given: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
    "random": lambda q, k, given: (k <= q) & (torch.rand(LENGTH, LENGTH) < 0.5),
    "added": lambda q, k, given: torch.where(k <= q, 0.0, 1.0),
    "documents": lambda q, k, given: (k <= q) & (k // 3 == q // 3),
    "or": lambda q, k, given: (k <= q) | (k == 6),
    "transposed": lambda q, k, given: (k <= q).transpose(0, 1),
    "as large as a mask": lambda q, k, given: _window(q, k).expand_as(
        (k <= q).expand(3, 1, -1, -1)
    ),
    "of a mask's dtype": lambda q, k, given: _window(q, k).to((k <= q).expand(3, 1, -1, -1)),
    "the other way, by name": lambda q, k, given: torch.le(other=k, input=q),
    "below every number": lambda q, k, given: (
        k < torch.full((LENGTH, 1), torch.iinfo(torch.int64).min)
    ),
}


def _written(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
    mask = k <= q
    mask[0] = True
    return mask


OTHERS["written to"] = _written

_OPERATORS = {getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")}
_OPERATORS |= {operator.add, operator.sub, operator.and_}


@pytest.fixture(params=["computed", "known by its rows", "computed for one of the batch"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Masks are small here, so that they would all be computed."""
    numels = {"known by its rows": 3 * LENGTH, "computed for one of the batch": LENGTH * LENGTH}
    monkeypatch.setattr(causal, "SMALL_NUMEL", numels.get(request.param, causal.SMALL_NUMEL))
    return str(request.param)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_not_made(name: str) -> None:
    model = Attends(CAUSAL[name])
    found, lines = attentions(model)
    assert found == [(False, True)] * 2
    assert lines == ("2 attentions are causal without a mask, which would take 49 B",) or (
        name in ("four dimensions", "packed", "packed behind")  # larger
    )
    captured = capture(model, *inputs()).capture
    made, _ = use_causal_attention(captured, lowering=Lowering.INDUCTOR)
    assert not [n for n in made.module.graph.nodes if n.target in (operator.le, torch.ones)]


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    found, lines = attentions(Attends(OTHERS[name]))
    assert found == [(True, False)] * 2 and lines == ()


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_operators_that_are_written_as_methods(name: str) -> None:
    """So does the Dynamo of torch 2.11 write some of them: `a.__eq__(b)`."""
    captured = capture(Attends({**CAUSAL, **OTHERS}[name]), *inputs()).capture
    for node in captured.module.graph.nodes:
        method = f"__{getattr(node.target, '__name__', '').strip('_')}__"
        tensor = node.args and isinstance(node.args[0], torch.fx.Node)
        if node.target in _OPERATORS and tensor and hasattr(torch.Tensor, method):
            node.op, node.target = "call_method", method
    captured.module.recompile()
    _, lines = use_causal_attention(captured, lowering=Lowering.INDUCTOR)
    assert bool(lines) is (name in CAUSAL)


@pytest.mark.usefixtures("size")
def test_a_mask_that_allows_everything_goes() -> None:
    found, _ = attentions(Attends(lambda q, k, given: (k >= 0) & (q >= 0)))
    assert found == [(False, False)] * 2


@pytest.mark.usefixtures("size")
def test_fewer_keys_than_queries_are_another_square() -> None:
    """What is_causal means there has changed between versions of torch, so the mask stays."""
    found, _ = attentions(Attends(lambda q, k, given: k <= q, keys=LENGTH - 2))
    assert found == [(True, False)] * 2


def test_a_mask_that_is_returned_is_made() -> None:
    model = Attends(CAUSAL["<="], returns=True)
    made, _ = use_causal_attention(capture(model, *inputs()).capture, lowering=Lowering.INDUCTOR)
    assert [n for n in made.module.graph.nodes if n.target is operator.le]


def test_eager_lowering_is_bitwise() -> None:
    found, lines = attentions(Attends(CAUSAL["<="]), Lowering.EAGER)
    assert found == [(True, False)] * 2 and lines == ()


def test_what_is_known_by_rows_is_what_would_be_computed() -> None:
    """Any numbers for keys and queries: never causal where the mask is not."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(3000):
        n = int(torch.randint(2, 5, (), generator=generator))
        step = torch.randint(0, 3, (2, n), generator=generator)
        keys, queries = step[0].cumsum(0)[None, :], step[1].cumsum(0)[:, None]
        for target in (operator.le, operator.lt, operator.ge, operator.gt, operator.eq):
            for left, right in ((keys, queries), (queries, keys)):
                mask = target(left, right)
                told = causal._compared(target, left, right, mask.shape)
                seen.add(told)
                if told is causal._Allows.ALL:
                    assert mask.all()
                elif told is causal._Allows.CAUSAL:
                    assert torch.equal(mask, torch.ones_like(mask).tril())
                elif target in (operator.le, operator.lt) and left is keys:
                    assert not torch.equal(mask, torch.ones_like(mask).tril())
    assert seen == {*causal._Allows, causal._UNKNOWN}


def test_numbers_are_compared_as_torch_does() -> None:
    """Neither do they wrap around, nor fail those that have no arithmetic."""
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float32, torch.complex64)
    generator = torch.Generator().manual_seed(0)
    for dtype, other in itertools.product(dtypes, dtypes):
        for target in (operator.le, operator.lt, operator.ge, operator.gt, operator.eq):
            keys = torch.randint(2, (1, 3), generator=generator).to(dtype)
            queries = torch.zeros(3, 1).to(other)
            try:
                mask = target(keys, queries)
            except (RuntimeError, TypeError):  # complex numbers have no order
                continue
            told = causal._compared(target, keys, queries, mask.shape)
            assert told is not causal._Allows.ALL or mask.all(), (target, dtype, other)
            assert told is not causal._Allows.CAUSAL or torch.equal(
                mask, mask.new_ones(3, 3).tril()
            )
    none = torch.zeros(1, 3, dtype=torch.uint8)
    assert causal._compared(operator.lt, none, none.T, (3, 3)) is causal._UNKNOWN
    # a scalar takes the dtype of the other side: 300 is 44 in 8 bits
    keys, scalar = torch.full((1, 3), 50, dtype=torch.uint8), torch.tensor(300)
    assert not (keys <= scalar).any()
    assert causal._compared(operator.le, keys.expand(3, 3), scalar, (3, 3)) is causal._UNKNOWN


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
def test_masks_are_computed_on_the_host(device: Any) -> None:
    """Whatever the graph says: a name, a number; there may be no such device, or it is full."""

    def mask(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cpu").to("cpu").tril()

    captured = capture(Attends(mask), *inputs()).capture
    values = propagate(captured)
    (ones,) = (n for n in captured.module.graph.nodes if n.target is torch.ones)
    (moved,) = (n for n in captured.module.graph.nodes if n.target == "to")
    (tril,) = (n for n in captured.module.graph.nodes if n.target == "tril")
    ones.kwargs = {**ones.kwargs, "device": device}
    moved.args = (ones, device)
    found = causal._Known(captured, values).of(tril)
    assert found.device.type == "cpu"
    assert causal._look(found) is causal._Allows.CAUSAL


def test_a_default_device_does_not_matter() -> None:
    captured = capture(Attends(CAUSAL["tril"]), *inputs()).capture
    values = propagate(captured)
    (tril,) = (n for n in captured.module.graph.nodes if n.target == "tril")
    with torch.device("meta"):
        assert causal._Known(captured, values).of(tril).device.type == "cpu"


def test_layers_that_make_the_same_mask_share_it() -> None:
    class Each(Attends):
        def forward(self, x: Tensor, given: Tensor) -> Any:
            for _ in range(4):
                q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
                x = F.scaled_dot_product_attention(x, x, x, (q - k[None]) >= 0)
            return self.project(x)

    captured = capture(Each(CAUSAL["<="]), *inputs()).capture
    known = causal._Known(captured, propagate(captured))
    masks = [n for n in captured.module.graph.nodes if n.target is operator.ge]
    assert len(masks) == 4
    assert len({id(known.of(mask)) for mask in masks}) == 1


def test_attention_takes_its_arguments_by_name_too() -> None:
    class Named(Attends):
        def forward(self, x: Tensor, given: Tensor) -> Any:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(x, key=x, value=x, attn_mask=mask)
            y = F.scaled_dot_product_attention(query=y, key=x, value=x, attn_mask=mask)
            return self.project(y)

    found, _ = attentions(Named(CAUSAL["<="]))
    assert found == [(False, True)] * 2


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_language_model_learns_the_same(device: str, checkpoints: bool, monkeypatch: Any) -> None:
    """Hugging Face's, whose plain loop passes is_causal itself; its mask is known by its rows."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(causal, "SMALL_NUMEL", 2**10)
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
        attn_implementation="sdpa",
    )

    def made() -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.to(device)

    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    plain, streamed = made(), megacompile(made(), lowering="inductor", progress=False)
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, streamed)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (name, a), b in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad.cpu(), a.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    reasons = [line for schedule in schedules(streamed) for line in schedule.plan.reasons]
    assert any(line.startswith("3 attentions are causal without a mask") for line in reasons)
