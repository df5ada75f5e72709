"""What a forward does to its inputs and buffers: changed in place, shared, or hooked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat, megacompile, schedules
from tests import inside, quantized
from tests.draws import drawn
from tests.zoo import assert_same, equal, twins

WIDTH = 8

# --- a value that a captured graph changes


def by_a_parameter(layer: Layer, x: Tensor) -> None:
    x.add_(layer.other(x * 2))


def in_part(layer: Layer, x: Tensor) -> None:
    x[:, :3] = layer.other(x * 2)[:, :3]


def drawn_scale(layer: Layer, x: Tensor) -> None:
    x *= torch.empty_like(x).uniform_(0.5, 1.5)


def unrecorded(layer: Layer, x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(1.5)


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "scaled": lambda layer, x: x.mul_(1.5),
    "drawn": drawn_scale,
    "by a parameter": by_a_parameter,
    "in part": in_part,
    "unrecorded": unrecorded,
    "detached": lambda layer, x: x.detach().mul_(1.5),
}


class Layer(nn.Module):
    """Changes its input, and hands on something else."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        out: Tensor = self.linear(x).tanh()
        return out


class Broken(nn.Module):
    """The input of a captured graph is a value, or a view of one, of the graph before it."""

    def __init__(self, change: Callable[[Any, Tensor], Any], *, view: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer, self.view = Layer(change), view

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 2
        if self.view:
            hidden = hidden.view(-1, WIDTH)
        torch._dynamo.graph_break()
        gate = self.layer(hidden)
        torch._dynamo.graph_break()
        loss: Tensor = (self.last(hidden) * gate).square().mean()
        return loss


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_of_the_user_is_changed(change: str) -> None:
    torch.manual_seed(0)
    given, models = torch.randn(5, WIDTH), twins(Layer(CHANGES[change]))
    for _ in range(2):
        found = []
        for model in models:
            torch.manual_seed(1)
            x = given.clone().requires_grad_()
            hidden = x * 2
            out = model(hidden)
            (out.sum() + hidden.square().sum()).backward()
            found.append((hidden.detach(), x.grad))
        assert all(map(equal, *found))
        assert_same(*models)


@pytest.mark.parametrize(
    ("change", "view"),
    [
        *((name, True) for name in CHANGES),
        ("scaled", False),
        ("in part", False),
        *(
            pytest.param(name, False, marks=pytest.mark.thorough)
            for name in CHANGES
            if name not in ("scaled", "in part")
        ),
    ],
)
def test_a_value_is_changed_between_graph_breaks(change: str, view: bool) -> None:
    torch.manual_seed(0)
    x, models = torch.randn(5, WIDTH), twins(Broken(CHANGES[change], view=view))
    for _ in range(2):
        losses = []
        for model in models:
            torch.manual_seed(1)
            losses.append(model(x))
            losses[-1].backward()
        assert equal(*(loss.detach() for loss in losses))
        assert_same(*models)


class Adds(nn.Module):
    """Adds to a sum; gives it, or what it is told to."""

    def __init__(self, gives: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gives = gives

    def forward(self, x: Tensor, total: Tensor, part: Tensor) -> Any:
        out = part * 2
        total += self.linear(x)
        return self.gives(total, out)


@pytest.mark.filterwarnings("ignore:megacompile")
@pytest.mark.parametrize("shares", [False, True])
def test_a_sum_that_a_model_adds_to(shares: bool) -> None:
    """Its gradients come through the sum alone. What comes to require grad together with a view of
    it runs in eager mode."""
    torch.manual_seed(0)
    x, models = torch.randn(5, WIDTH), twins(Adds(lambda total, out: out))
    for model in models:
        total, other = torch.zeros(5, WIDTH), torch.ones(2, WIDTH)
        for _ in range(1 if shares else 3):
            part = model(x, total, total[:2] if shares else other)
        (part.sum() + total.square().sum()).backward()
    assert_same(*models)


def test_the_input_itself_comes_back() -> None:
    torch.manual_seed(0)
    models = twins(Adds(lambda total, out: total))
    given, x = torch.randn(5, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    for model in models:
        hidden = given + 2
        out = model(x, hidden, x)
        assert out is hidden
        out.mul_(3)
        hidden.square().sum().backward()
    assert_same(*models)


def test_a_leaf_under_no_grad() -> None:
    torch.manual_seed(0)
    given, models, found = torch.randn(5, WIDTH), twins(Layer(unrecorded)), []
    for model in models:
        x = given.clone().requires_grad_()
        model(x).sum().backward()
        found.append((x.detach(), x.grad))
    assert_same(*models)
    assert all(map(equal, *found))


# --- inputs and buffers that share memory

WORDS = 12


class Language(nn.Module):
    """Masks its labels in place, before it reads its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 3] = 0
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.reshape(-1).long())


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
    "another view": lambda text: (text.view(4, 9), text.view(4, 9)),
    "columns": lambda text: (text[:, :4], text[:, 4:8]),
}
APART: Callable[[Tensor], tuple[Tensor, Tensor]] = lambda _: (text(7), text(8))  # noqa: E731


@pytest.mark.parametrize(
    "name", drawn(["shifted", "numpy", "two dtypes", "itself"], ["another view", "columns"])
)
@pytest.mark.filterwarnings("ignore:megacompile. Language")  # eager code, where no base can be made
def test_tokens_see_what_is_done_to_labels(name: str) -> None:
    """And so does who gave them; before and behind a batch whose labels lie elsewhere."""
    torch.manual_seed(0)
    plain, streamed = twins(Language())
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
    apart, shared = twins(Language())[1], twins(Language())[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart(*APART(text()))
        shared(*SHARED["shifted"](text()))
    (mine,), (theirs,) = schedules(apart), schedules(shared)
    assert [stage.name for stage in mine.stages] == [stage.name for stage in theirs.stages]


class Odd(nn.Module):
    """Buffers that overlap, one that it gives back, and an input whose shape it changes."""

    one: Tensor
    other: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        memory = torch.ones(6)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("one", memory[:4])
        self.register_buffer("other", memory[2:])
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        self.one += x.detach().mean(0)
        self.count += 1
        return (self.last(x) * self.other).sum(), seen.add_(x.detach().sum())


def test_buffers_that_overlap_and_what_stays_the_same_tensor() -> None:
    torch.manual_seed(0)
    plain, streamed = Odd(), Odd()
    streamed.load_state_dict(plain.state_dict())  # a copy's buffers would not overlap
    megacompile(streamed, device="cpu", lowering="eager")
    shown = []
    for model in (plain, streamed):
        count, seen = model.count, torch.zeros(3)
        for seed in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            loss, given = model(x, seen)
            loss.backward()
            assert given is seen
        assert model.count is count and count[0] == 3
        shown.append(seen)
    assert equal(*shown)
    assert_same(plain, streamed)


class Squeezing(nn.Module):
    """Changes the shape of an input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        y.unsqueeze_(0)
        total: Tensor = (self.layer(x) * y).sum()
        return total


@pytest.mark.filterwarnings("ignore:megacompile. Squeezing")
def test_a_view_whose_shape_is_changed_in_place() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Squeezing())
    mine, theirs = torch.ones(5, 4), torch.ones(5, 4)
    assert equal(plain(mine[:4], mine[1:]), streamed(theirs[:4], theirs[1:]))
    assert torch.equal(mine, theirs)


def test_an_input_in_the_memory_of_a_parameter() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Language())
    for model in (plain, streamed):
        model.head.weight.data.fill_(3.0)
    tokens = text()[:, :8]
    mine = plain(tokens, plain.head.weight.data[:4])
    with pytest.warns(UserWarning, match="share memory"):
        theirs = streamed(tokens, streamed.head.weight.data[:4])
    assert equal(mine.detach(), theirs.detach())
    assert_same(plain, streamed)


# --- the hook of transformers and PEFT that lets inputs require grad


def hooked(kind: str) -> quantized.Model:
    def make_inputs_require_grads(module: Any, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model = quantized.model(quantized.OWN[kind])
    model.embed.register_forward_hook(make_inputs_require_grads)
    return model


@pytest.mark.parametrize("kind", quantized.OWN)
def test_inputs_that_a_hook_lets_require_grad_break_no_graph(kind: str) -> None:
    expected = quantized.trained(hooked(kind), steps=2)
    model = megacompile(hooked(kind), lowering="eager")
    (hook,) = compat.forward_hooks_of(model.embed).values()
    found = quantized.trained(model, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (schedule,) = schedules(model)
    assert len(schedule.stages) == 5
    assert list(compat.forward_hooks_of(model.embed).values()) == [hook]


def test_hooks_that_pile_up_capture_nothing_anew() -> None:
    """TRL turns checkpoints off and on in every step, and transformers adds a hook each time."""
    plain, model = hooked("wrapper"), megacompile(hooked("wrapper"), lowering="eager")
    order: list[str] = []
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
    model.embed.register_forward_hook(lambda module, args, out: order.append("another"))
    model.embed.register_forward_hook(hook)  # behind another, so it is not left out
    model(ids)
    hooks = compat.forward_hooks_of(model.embed)
    assert list(hooks) == sorted(hooks) and len(hooks) == 6
    assert order == ["another"]
    seen = torch.tensor([0.0, -0.0, 1.5, float("-inf"), 1e-45])  # what such a hook adds to
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = seen.to(dtype)
        assert torch.equal(
            (given + torch.full((), -0.0)).view(torch.uint8), given.view(torch.uint8)
        )
