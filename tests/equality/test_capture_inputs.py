"""What a forward does to its inputs and buffers: changed in place, shared, or hooked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import graph_break

from megacompile import compat, megacompile, schedules
from tests import inside, quantized
from tests.equality.nets import Applies, in_a_row
from tests.zoo import assert_same, equal, twins

WIDTH = 8

# --- a value that a captured graph changes


def in_part(m: Any, x: Tensor) -> None:
    x[:, :3] = m.last(x * 2)[:, :3]


def unrecorded(m: Any, x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(1.5)


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "scaled": lambda m, x: x.mul_(1.5),
    "by a parameter": lambda m, x: x.add_(m.last(x * 2)),
    "in part": in_part,
    "unrecorded": unrecorded,
    "detached": lambda m, x: x.detach().mul_(1.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_of_the_user_is_changed(name: str) -> None:
    """Under no_grad a leaf, too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        CHANGES[name](m, x)
        out: Tensor = m.first(x).tanh()
        return out

    models = twins(in_a_row(forward, width=WIDTH))
    given = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
    for is_leaf in (False, False, True)[: 3 if name == "unrecorded" else 2]:
        found = []
        for model in models:
            x = given.clone().requires_grad_()
            hidden = x if is_leaf else x * 2
            out = model(hidden)
            (out.sum() + hidden.square().sum()).backward()
            found.append((hidden.detach(), x.grad))
        assert all(map(equal, *found))
        assert_same(*models)


@pytest.mark.parametrize(
    ("change", "view"), [*((name, True) for name in CHANGES), ("scaled", False), ("in part", False)]
)
def test_a_value_is_changed_between_graph_breaks(change: str, view: bool) -> None:
    """The input of a captured graph is a value, or a view of one, of the graph before it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x) * 2
        if view:
            hidden = hidden.view(-1, WIDTH)
        graph_break()
        CHANGES[change](m, hidden)
        gate = m.middle(hidden).tanh()
        graph_break()
        loss: Tensor = (m.last(hidden) * gate).square().mean()
        return loss

    models = twins(in_a_row(forward, count=3, width=WIDTH))
    for _ in range(2):
        losses = [model(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)) for model in models]
        for loss in losses:
            loss.backward()
        assert equal(*(loss.detach() for loss in losses))
        assert_same(*models)


def adds(gives: Callable[[Tensor, Tensor], Any]) -> Any:
    """Models that add to a sum; they give it, or what they are told to."""

    def forward(m: Any, x: Tensor, total: Tensor, part: Tensor) -> Any:
        out = part * 2
        total += m.first(x)
        return gives(total, out)

    return twins(in_a_row(forward, count=1, width=WIDTH))


@pytest.mark.filterwarnings("ignore:megacompile")
@pytest.mark.parametrize("shares", [False, True])
def test_a_sum_that_a_model_adds_to(shares: bool) -> None:
    """Its gradients come through the sum alone. What comes to require grad together with a view of
    it runs in eager mode."""
    x, models = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH), adds(lambda total, out: out)
    for model in models:
        total, other = torch.zeros(5, WIDTH), torch.ones(2, WIDTH)
        for _ in range(1 if shares else 3):
            part = model(x, total, total[:2] if shares else other)
        (part.sum() + total.square().sum()).backward()
    assert_same(*models)


def test_the_input_itself_comes_back() -> None:
    models = adds(lambda total, out: total)
    given, x = torch.ones(5, WIDTH, requires_grad=True), torch.ones(5, WIDTH)
    for model in models:
        hidden = given + 2
        out = model(x, hidden, x)
        assert out is hidden
        out.mul_(3)
        hidden.square().sum().backward()
    assert_same(*models)


# --- inputs and buffers that share memory

WORDS = 12


def language() -> Any:
    """Models that mask their labels in place, before they read their tokens."""

    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 3] = 0
        hidden = m.embed(tokens)
        for layer in m.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(m.head(hidden).flatten(0, 1), labels.reshape(-1).long())

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    head = nn.Linear(WIDTH, WORDS)
    return twins(Applies(forward, embed=nn.Embedding(WORDS, WIDTH), layers=layers, head=head))


def text(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (4, 9), generator=generator)


def of_numpy(tokens: Tensor) -> tuple[Tensor, Tensor]:
    array = tokens.flatten().numpy()
    first, second = torch.from_numpy(array[:-4]), torch.from_numpy(array[4:])
    return first.view(4, 8), second.view(4, 8)


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {  # the tokens, the labels
    "shifted": lambda text: (text[:, :-1], text[:, 1:]),
    "numpy": of_numpy,
    "two dtypes": lambda text: (text[:2], text.view(torch.int32)[:2, ::2]),
    "itself": lambda text: (text, text),
}
APART: Callable[[Tensor], tuple[Tensor, Tensor]] = lambda _: (text(7), text(8))  # noqa: E731


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.filterwarnings("ignore:megacompile. Applies")  # eager code, where no base can be made
def test_tokens_see_what_is_done_to_labels(name: str) -> None:
    """And so does who gave them; before and behind a batch whose labels lie elsewhere."""
    plain, streamed = language()
    order = [SHARED[name], APART, SHARED[name]]
    for seed, make in enumerate(order[1:] if name == "itself" else order):
        mine, theirs = text(seed), text(seed)
        losses = [plain(*make(mine)), streamed(*make(theirs))]
        for loss in losses:
            loss.backward()
        assert equal(*(loss.detach() for loss in losses))
        assert torch.equal(mine, theirs)
        assert_same(plain, streamed)


def test_a_shared_base_ties_no_stages_together() -> None:
    apart, shared = language()[1], language()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart(*APART(text()))
        shared(*SHARED["shifted"](text()))
    (mine,), (theirs,) = schedules(apart), schedules(shared)
    assert [stage.name for stage in mine.stages] == [stage.name for stage in theirs.stages]


def test_buffers_that_overlap_and_what_stays_the_same_tensor() -> None:
    """A buffer is counted up in place, an input is given back."""

    def forward(m: Any, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        x = m.first(x)
        m.one += x.detach().mean(0)
        m.counted += 1
        return (m.last(x) * m.other).sum(), seen.add_(x.detach().sum())

    def made() -> Any:
        memory = torch.ones(6)
        return in_a_row(forward, one=memory[:4], other=memory[2:], counted=torch.zeros(4))

    models = made(), megacompile(made(), device="cpu", lowering="eager")
    shown = []
    for model in models:
        counted, seen = model.counted, torch.zeros(3)
        for seed in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            loss, given = model(x, seen)
            loss.backward()
            assert given is seen
        assert model.counted is counted and counted[0] == 3
        shown.append(seen)
    assert equal(*shown)
    assert_same(*models)


@pytest.mark.filterwarnings("ignore:megacompile. Applies")
def test_a_view_whose_shape_is_changed_in_place() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        y.unsqueeze_(0)
        total: Tensor = (m.first(x) * y).sum()
        return total

    plain, streamed = twins(in_a_row(forward, count=1))
    mine, theirs = torch.ones(5, 4), torch.ones(5, 4)
    assert equal(plain(mine[:4], mine[1:]), streamed(theirs[:4], theirs[1:]))
    assert torch.equal(mine, theirs)


def test_an_input_in_the_memory_of_a_parameter() -> None:
    plain, streamed = language()
    for model in (plain, streamed):
        model.head.weight.data.fill_(3.0)
    tokens = text()[:, :8]
    mine = plain(tokens, plain.head.weight.data[:4])
    with pytest.warns(UserWarning, match="share memory"):
        theirs = streamed(tokens, streamed.head.weight.data[:4])
    assert equal(mine.detach(), theirs.detach())
    assert_same(plain, streamed)


# --- the hook of transformers and PEFT that lets inputs require grad


def hooked() -> quantized.Model:
    def make_inputs_require_grads(module: Any, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model = quantized.model(quantized.wrapped)
    model.embed.register_forward_hook(make_inputs_require_grads)
    return model


def test_inputs_that_a_hook_lets_require_grad_break_no_graph() -> None:
    expected = quantized.trained(hooked(), steps=2)
    model = megacompile(hooked(), lowering="eager")
    (hook,) = compat.forward_hooks_of(model.embed).values()
    found = quantized.trained(model, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (schedule,) = schedules(model)
    assert len(schedule.stages) == 5
    assert list(compat.forward_hooks_of(model.embed).values()) == [hook]


def test_hooks_that_pile_up_capture_nothing_anew() -> None:
    """TRL turns checkpoints off and on in every step, and transformers adds a hook each time."""
    plain, model = hooked(), megacompile(hooked(), lowering="eager")
    ids = torch.arange(16).view(2, 8)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            hook = next(iter(compat.forward_hooks_of(each.embed).values()))
            each.embed.register_forward_hook(hook)
            each(ids).backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(equal(a.grad, b.grad) for a, b in pairs)
        hooks = compat.forward_hooks_of(model.embed)
        assert list(hooks) == sorted(hooks) and len(hooks) == step + 2
    assert len(inside.streamed(model).graphs) == 1
    seen = torch.tensor([0.0, -0.0, 1.5, float("-inf"), 1e-45])  # what such a hook adds to
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = seen.to(dtype)
        assert torch.equal(
            (given + torch.full((), -0.0)).view(torch.uint8), given.view(torch.uint8)
        )
