"""Whole steps with the head in chunks, against the plain model in the same run.

How many chunks there are is decided in tests/unit; that they add up, unit/test_chunk.py tests.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.ir.stages import Code
from tests import inside
from tests.zoo import hf_qwen2

BATCH, LENGTH, WIDTH, CLASSES = 3, 21, 16, 64
ROWS = BATCH * LENGTH


class Decoder(nn.Module):
    """An embedding, layers, a norm and a head; gives the loss, and the logits if asked."""

    def __init__(self, *, tied: bool = False, bias: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.head.requires_grad_(not frozen)

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)  # (batch, length, width)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, ids: Tensor, *, logits: bool = False, **options: Any) -> Any:
        scores = self.head(self.norm(self.hidden(ids)))
        ignored = options.get("ignore_index", -100)
        targets = F.pad(ids, (0, 1), value=ignored)[:, 1:].flatten()
        loss = F.cross_entropy(scores.float().flatten(0, 1), targets, **options)
        return (loss, scores) if logits else loss


def ids(seed: int = 1, *, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CLASSES, (batch, length), generator=generator)


def twins(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    plain = copy.deepcopy(model)
    settings = {"device": "cpu", "head": "chunked", "progress": False, **options}
    return plain, megacompile(model, **settings)


def compare(plain: nn.Module, streamed: nn.Module, tolerance: float = 1e-5) -> None:
    """Every gradient within `tolerance` of the largest element of the plain one."""
    pairs = zip(plain.named_parameters(), streamed.parameters(), strict=True)
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            atol = tolerance * float(p.grad.abs().max())
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=atol, msg=name)


def step(plain: Any, streamed: Any, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
    want, got = plain(*args, **kwargs), streamed(*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for loss in (want, got):
        (loss * scale).backward()
    compare(plain, streamed)


def is_chunked(streamed: nn.Module) -> bool:
    """Is there no value with a number for each token and class in the stages' graphs?"""
    stages = schedules(streamed)[-1].stages
    graphs = [module.graph for stage in stages for module in stage.traced.graphs.values()]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not any(CLASSES in v.shape and v.numel() >= ROWS * CLASSES for v in tensors)


def flags(streamed: nn.Module, code: Code) -> tuple[bool, ...]:
    """Which gradients the head of the last stage computes."""
    graph = schedules(streamed)[-1].stages[-1].traced.graphs[code].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    (node,) = graph.find_nodes(op="call_function", target=operator)
    return tuple(node.args[-3:])


@pytest.mark.parametrize(("tied", "bias", "frozen"), [(True, True, False), (False, False, True)])
def test_gradients_of_steps_and_their_sum(tied: bool, bias: bool, frozen: bool) -> None:
    """The second backward accumulates into the first's gradients; one loss has two backwards."""
    plain, streamed = twins(Decoder(tied=tied, bias=bias, frozen=frozen))
    for seed in (1, 2):
        step(plain, streamed, ids(seed))
    assert is_chunked(streamed)
    for model in (plain, streamed):
        loss = model(ids())
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    compare(plain, streamed)
    _, whole = twins(Decoder(tied=tied, bias=bias, frozen=frozen), head="whole")
    whole(ids()).backward()
    assert not is_chunked(whole), "what the assertion above would find"


def test_half_precision() -> None:
    """In autocast, and of fp32 masters that the backward updates: the bf16 weight gradient."""
    plain, streamed = twins(Decoder())
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(ids()) for model in (plain, streamed)]
    for loss in losses:
        loss.backward()
    compare(plain, streamed, 2e-2)
    assert is_chunked(streamed)

    model = Decoder(tied=True)
    plain, before = copy.deepcopy(model).bfloat16(), model.head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: Any = {"compute_dtype": torch.bfloat16, "optimizer": optimizer}
    megacompile(model, device="cpu", head="chunked", **options)
    want, got = plain(ids()), model(ids())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for loss in (want, got):
        loss.backward()
    optimizer.step()
    gradient = plain.head.weight.grad
    assert gradient is not None
    error = before - model.head.weight.detach() - gradient.float()
    assert error.norm() <= 2e-2 * gradient.float().norm()


def test_gradients_are_computed_where_they_are_needed() -> None:
    """And saved, not logits: a forward that saves nothing computes none."""
    plain, streamed = twins(Decoder(bias=True))
    streamed(ids()).backward()
    schedule = schedules(streamed)[-1]
    last = schedule.stages[-1].traced
    assert flags(streamed, Code.FORWARD) == (False, False, False)
    assert flags(streamed, Code.FORWARD_SAVING) == (True, True, True)
    saved = [meta.shape for meta in last.saved]
    assert (CLASSES, WIDTH) in saved and (ROWS, WIDTH) in saved
    backward = last.graphs[Code.BACKWARD].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    assert not backward.find_nodes(op="call_function", target=operator)
    assert schedule.plan.keep == {schedule.stages[-1].index}
    for model in (plain, streamed):
        model.eval().requires_grad_(False)
    torch.testing.assert_close(streamed(ids()), plain(ids()), rtol=1e-6, atol=0)
    assert schedules(streamed)[-1].backward is None and is_chunked(streamed)
    assert flags(streamed, Code.FORWARD) == (False, False, False)


def test_a_recomputed_head() -> None:
    """A guess at the gradients that was wrong recomputes every stage, the head too."""

    class Two(Decoder):
        def forward(self, ids: Tensor, **options: Any) -> Any:
            x = self.norm(self.layers[0](self.embed(ids)))
            loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
            return loss, x.square().mean(), loss * 2

    plain, streamed = twins(Two())
    for model in (plain, streamed):
        _, penalty, twice = model(ids())
        (penalty + twice).backward()
    compare(plain, streamed)


@pytest.mark.skipif(not inside.has_cpp_compiler(), reason="no C++ compiler here")
def test_inductor_compiles_a_head_in_chunks() -> None:
    model = Decoder(tied=True)
    model.layers = nn.ModuleList()
    plain, streamed = twins(model, lowering="inductor")
    step(plain, streamed, ids())
    assert is_chunked(streamed)
    assert flags(streamed, Code.FORWARD_SAVING) == (True, True, False)


def test_returned_logits_are_returned() -> None:
    """Bitwise; the user and the printed schedule say so. "auto" stands back in silence."""
    plain, streamed = twins(Decoder())
    with pytest.warns(UserWarning, match="logits"):
        got = streamed(ids(), logits=True)
    assert all(map(torch.equal, got, plain(ids(), logits=True)))
    (reason, *_) = schedules(streamed)[-1].plan.reasons
    assert f"# plan: {reason}" in str(schedules(streamed)[-1])
    plain, streamed = twins(Decoder(), head="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(streamed(ids()), plain(ids()))


class LossAlone(nn.Module):
    """A Hugging Face model whose caller wants the loss, not the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        return self.model(input_ids=ids, labels=ids, **options).loss


def test_a_model_of_transformers() -> None:
    """Its loss alone, of a mean, or divided by a count that Trainer gives as a tensor."""
    inner = hf_qwen2(vocab_size=CLASSES, tie_word_embeddings=True)
    plain, streamed = twins(LossAlone(inner), dynamic=False)  # a count would be a symbol
    for count in (None, torch.tensor(200), 200):
        given: Any = {} if count is None else {"num_items_in_batch": count}
        step(plain, streamed, ids(), **given)
        assert is_chunked(streamed)
