"""Whole steps with the head in chunks, against the plain model in the same run."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.cost.ops import work_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.passes.capture import chunk
from tests.zoo import hf_qwen2

BATCH, LENGTH, WIDTH, CLASSES = 3, 85, 16, 64
ROWS = BATCH * LENGTH  # 255
CHUNK_ROWS = 20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK_BYTES", CHUNK_ROWS * CLASSES * 4)


class Decoder(nn.Module):
    """An embedding, layers, a norm and a head; gives the loss, and the logits if asked."""

    def __init__(self, *, tied: bool = False, bias: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.head.requires_grad_(not frozen)

    def forward(self, ids: Tensor, *, logits: bool = False, **options: Any) -> Any:
        x = self.embed(ids)  # (batch, length, width)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores = self.head(self.norm(x))
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


def schedule_of(streamed: nn.Module) -> Schedule:
    """The newest one."""
    return schedules(streamed)[-1]


def logits_in(schedule: Schedule) -> list[str]:
    """The values in the stages' graphs with a number for each token and class, or more."""
    found = []
    for stage in schedule.stages:
        for code, module in stage.traced.graphs.items():
            for node in module.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, Tensor) and CLASSES in value.shape:
                    if value.numel() >= ROWS * CLASSES:
                        found.append(f"{stage.name} {code.value} {node}")
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_two_steps_and_their_sum(tied: bool, bias: bool, frozen: bool) -> None:
    """The second backward accumulates into the first's gradients."""
    plain, streamed = twins(Decoder(tied=tied, bias=bias, frozen=frozen))
    for seed in (1, 2):
        step(plain, streamed, ids(seed))
    assert "is computed in chunks of 20 tokens" in schedule_of(streamed).plan.reasons[0]
    assert not logits_in(schedule_of(streamed))


def test_the_whole_head_holds_its_logits() -> None:
    """What the test above would find."""
    _, streamed = twins(Decoder(), head="whole")
    streamed(ids()).backward()
    assert logits_in(schedule_of(streamed))
    assert "the head is whole: head='whole'" in schedule_of(streamed).plan.reasons


@pytest.mark.parametrize("length", [1, 7, 255, 1023])
def test_odd_counts_of_tokens(length: int) -> None:
    plain, streamed = twins(Decoder())
    step(plain, streamed, ids(batch=1, length=length), reduction="sum")


def test_changing_lengths() -> None:
    """Without symbols each length has a head in chunks."""

    class Shifted(Decoder):
        def forward(self, ids: Tensor, **options: Any) -> Any:
            scores = self.head(self.norm(self.layers[0](self.embed(ids))))
            batch, length, classes = scores.shape
            kept = scores[:, : length - 1].contiguous().view(batch * (length - 1), classes)
            return F.cross_entropy(kept, ids[:, 1:].reshape(-1))

    plain, streamed = twins(Shifted(), dynamic=False)
    for length in (30, 31, 47):
        step(plain, streamed, ids(length=length))
        reason = schedule_of(streamed).plan.reasons[0]
        assert f"the head of {BATCH * (length - 1)} tokens" in reason


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"ignore_index": 5},
        {"reduction": "sum", "label_smoothing": 0.3, "ignore_index": 5},
    ],
    ids=str,
)
def test_options_of_the_loss(options: dict[str, Any]) -> None:
    plain, streamed = twins(Decoder(bias=True))
    step(plain, streamed, ids(), scale=7.0, **options)
    assert "in chunks" in schedule_of(streamed).plan.reasons[0]


def test_every_token_ignored() -> None:
    plain, streamed = twins(Decoder())
    same = torch.full((BATCH, LENGTH), 5)
    want, got = (m(same, ignore_index=5) for m in (plain, streamed))
    assert want.isnan() and got.isnan()
    for loss in (want, got):
        loss.backward()
    for p, q in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert torch.equal(q.grad, p.grad) and not p.grad.any()


def test_optimizer_steps() -> None:
    plain, streamed = twins(Decoder(tied=True))
    losses: list[list[float]] = []
    for model in (plain, streamed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for seed in range(5):
            loss = model(ids(seed))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_update_in_the_backward() -> None:
    model = Decoder()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.1}
    theirs = torch.optim.SGD(plain.parameters(), **settings)
    mine = torch.optim.SGD(model.parameters(), **settings)
    megacompile(model, device="cpu", head="chunked", optimizer=mine)
    for seed in range(3):
        for m, optimizer in ((plain, theirs), (model, mine)):
            m(ids(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6)


def test_compute_in_bfloat16() -> None:
    """fp32 masters: the weight's gradient is that of the bf16 computation, to bf16's rounding."""
    model = Decoder()
    plain = copy.deepcopy(model).bfloat16()
    streamed = megacompile(model, device="cpu", head="chunked", compute_dtype=torch.bfloat16)
    want, got = plain(ids()), streamed(ids())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for loss in (want, got):
        loss.backward()
    p, q = plain.head.weight.grad, streamed.head.weight.grad
    assert p is not None and q is not None
    assert (q - p.float()).norm() <= 2e-2 * p.float().norm()


def flags(schedule: Schedule, code: Code) -> tuple[bool, ...]:
    """Which gradients the head of the last stage computes."""
    graph = schedule.stages[-1].traced.graphs[code].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    (node,) = graph.find_nodes(op="call_function", target=operator)
    return tuple(node.args[-3:])


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_no_gradients_are_computed_where_none_is_needed(mode: str) -> None:
    plain, streamed = twins(Decoder())
    if mode == "eval":
        for model in (plain, streamed):
            model.eval().requires_grad_(False)
    off = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with off.get(mode, contextlib.nullcontext)():
        torch.testing.assert_close(streamed(ids()), plain(ids()), rtol=1e-6, atol=0)
    schedule = schedule_of(streamed)
    assert schedule.backward is None and not logits_in(schedule)
    assert flags(schedule, Code.FORWARD) == (False, False, False)


def test_what_is_saved_are_gradients() -> None:
    """No logits; and a forward that saves nothing computes no gradient."""
    _, streamed = twins(Decoder(bias=True))
    streamed(ids()).backward()
    schedule = schedule_of(streamed)
    last = schedule.stages[-1].traced
    assert flags(schedule, Code.FORWARD) == (False, False, False)
    assert flags(schedule, Code.FORWARD_SAVING) == (True, True, True)
    products = 2 * ROWS * WIDTH * CLASSES
    layers = work_of(last, Code.FORWARD)[0] - products  # that share the stage with the head
    assert work_of(last, Code.FORWARD_SAVING)[0] == layers + 3 * products
    saved = [meta.shape for meta in last.saved]
    assert (CLASSES, WIDTH) in saved and (ROWS, WIDTH) in saved
    backward = last.graphs[Code.BACKWARD].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    assert not backward.find_nodes(op="call_function", target=operator)
    assert schedule.plan.keep == {schedule.stages[-1].index}


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


def test_backward_twice() -> None:
    plain, streamed = twins(Decoder())
    for model in (plain, streamed):
        loss = model(ids())
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    compare(plain, streamed)


def test_autocast() -> None:
    plain, streamed = twins(Decoder())
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(ids()), streamed(ids())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    for loss in (want, got):
        loss.backward()
    compare(plain, streamed, 2e-2)
    assert "in chunks" in schedule_of(streamed).plan.reasons[0]


def test_inductor() -> None:
    """Compiled, where "auto" takes chunks by itself."""
    plain, streamed = twins(Decoder(tied=True), lowering="inductor", head="auto")
    step(plain, streamed, ids())
    schedule = schedule_of(streamed)
    assert "in chunks" in schedule.plan.reasons[0] and not logits_in(schedule)
    assert flags(schedule, Code.FORWARD_SAVING) == (True, True, False)


# --- what stands back


def test_returned_logits_are_returned() -> None:
    """Bitwise, as without the option; the user is told, and so is who prints the schedule."""
    plain, streamed = twins(Decoder())
    with pytest.warns(UserWarning, match="head='chunked', but the head is whole: the logits"):
        got = streamed(ids(), logits=True)
    want = plain(ids(), logits=True)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    reason = "the head is whole: the logits (scores) are returned to the caller; return the loss"
    assert schedule_of(streamed).plan.reasons[0] == reason
    assert f"# plan: {reason}" in str(schedule_of(streamed))


def test_auto_stands_back_without_a_word() -> None:
    plain, streamed = twins(Decoder(), head="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(streamed(ids()), plain(ids()))
    assert "lowering='eager' is bitwise" in schedule_of(streamed).plan.reasons[0]


# --- transformers


class LossAlone(nn.Module):
    """A Hugging Face model whose caller wants the loss, not the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, **options).loss
        return loss


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face(tied: bool) -> None:
    inner = hf_qwen2(vocab_size=CLASSES, tie_word_embeddings=tied)
    plain, streamed = twins(LossAlone(inner), dynamic=False)  # a count would be a symbol
    step(plain, streamed, ids())
    assert "the head of 255 tokens by 64 classes" in schedule_of(streamed).plan.reasons[0]
    for count in (torch.tensor(200), 200):  # Trainer gives a tensor
        step(plain, streamed, ids(), num_items_in_batch=count)
        assert "in chunks" in schedule_of(streamed).plan.reasons[0]
        assert not logits_in(schedule_of(streamed))


def test_hugging_face_returns_logits() -> None:
    plain, streamed = twins(hf_qwen2(vocab_size=CLASSES), head="auto", lowering="eager")
    want, got = (m(input_ids=ids(), labels=ids()) for m in (plain, streamed))
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    _, streamed = twins(hf_qwen2(vocab_size=CLASSES))
    with pytest.warns(UserWarning, match="returned to the caller"):
        streamed(input_ids=ids(), labels=ids())
