"""Inputs and buffers that share memory, of which the forward changes one in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.runtime.params.inputs import moved, moved_together, overlaps
from tests import inside
from tests.zoo import assert_same, equal, stack, step, twins

WORDS = 12


class Language(nn.Module):
    """Masks its labels in place, before it reads its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 3] = 0
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.reshape(-1).long())


def language() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(Language())


Pair = tuple[Tensor, Tensor, Tensor]  # what is shared, the tokens, the labels


def _text(seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (4, 9), generator=generator).to(dtype)


def _shifted(seed: int) -> Pair:
    text = _text(seed)
    return text, text[:, :-1], text[:, 1:]


def _itself(seed: int) -> Pair:
    text = _text(seed)
    return text, text, text


def _another_view(seed: int) -> Pair:
    text = _text(seed)
    return text, text.view(4, 9), text.view(4, 9)


def _columns(seed: int) -> Pair:
    text = _text(seed)
    return text, text[:, :4], text[:, 4:8]


def _numpy(seed: int) -> Pair:
    array = _text(seed).flatten().numpy()
    tokens, labels = torch.from_numpy(array[:-4]), torch.from_numpy(array[4:])
    return torch.from_numpy(array), tokens.view(4, 8), labels.view(4, 8)


def _two_dtypes(seed: int) -> Pair:
    text = _text(seed)
    return text, text[:2], text.view(torch.int32)[:2, ::2]


def _apart(seed: int) -> Pair:
    return _text(seed), _text(seed + 1), _text(seed + 2)


SHARED: dict[str, Callable[[int], Pair]] = {
    "shifted": _shifted,
    "itself": _itself,
    "another view": _another_view,
    "columns": _columns,
    "numpy": _numpy,
    "two dtypes": _two_dtypes,
}


@pytest.mark.parametrize("before", ["shared", "apart"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.filterwarnings("ignore:megacompile. Language")  # eager code, where no base can be made
def test_tokens_see_what_is_done_to_labels(name: str, before: str) -> None:
    plain, streamed = language()
    order = [SHARED[name], SHARED[name], _apart, SHARED[name]]
    for seed, make in enumerate(order if before == "shared" else [_apart, *order]):
        (mine, *mine_given), (theirs, *theirs_given) = make(seed), make(seed)
        loss, ours = plain(*mine_given), streamed(*theirs_given)
        assert equal(loss.detach(), ours.detach())
        assert torch.equal(mine, theirs), "and so does who gave them"
        loss.backward()
        ours.backward()
        assert_same(plain, streamed)


def test_a_shared_base_ties_no_stages_together() -> None:
    apart, shared = language()[1], language()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart(*_apart(0)[1:])
        shared(*_shifted(0)[1:])
    (mine,), (theirs,) = schedules(apart), schedules(shared)
    assert [stage.name for stage in mine.stages] == [stage.name for stage in theirs.stages]


class Twofold(nn.Module):
    """Adds to one buffer, and reads another one that begins within it."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.ones(6)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.one: Tensor
        self.other: Tensor
        self.register_buffer("one", memory[:4])
        self.register_buffer("other", memory[2:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.one += x.detach().mean(0)
        total: Tensor = (self.last(x) * self.other).sum()
        return total


def test_buffers_that_overlap() -> None:
    torch.manual_seed(0)
    model = Twofold()
    plain = Twofold()
    plain.load_state_dict(model.state_dict())
    streamed = megacompile(model, device="cpu", lowering="eager")
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        assert equal(step(plain, {"x": x}), step(streamed, {"x": x}))
        assert_same(plain, streamed)


class Counting(nn.Module):
    """Gives back a buffer and an input that it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.layer(x), seen.add_(x.sum())


def test_what_is_changed_in_place_stays_the_same_tensor() -> None:
    plain, streamed = twins(Counting())
    for model in (plain, streamed):
        count, seen = model.count, torch.zeros(3)
        for _ in range(2):
            assert model(torch.ones(2, 4), seen)[1] is seen
        assert model.count is count and count[0] == 2 and seen[0] == 16


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
    text = _text(0)
    for model in (plain, streamed):
        model.head.weight.data.fill_(3.0)
        with (
            pytest.warns(UserWarning, match="share memory")
            if model is streamed
            else (warnings.catch_warnings())
        ):
            labels = model.head.weight.data[:4]
            model.seen = model(text[:, :8], labels).detach()
    assert equal(plain.seen, streamed.seen)
    assert torch.equal(plain.head.weight, streamed.head.weight)


# --- moved to the device, here: copied


def copied(*tensors: Tensor) -> list[Tensor]:
    return moved_together(tensors, lambda tensor: tensor.clone())


def test_what_overlaps_is_moved_together() -> None:
    text = _text(0)
    tokens, labels, other = copied(text[:, :-1], text[:, 1:], _text(1))
    labels.fill_(5)
    assert (tokens[:, 1:] == 5).all() and not (text == 5).all()
    assert torch.equal(other, _text(1))
    assert tokens.shape == labels.shape == (4, 8)


def test_the_same_tensor_stays_the_same() -> None:
    x = torch.ones(3)
    (one, [two]), kwargs = moved((x, [x]), {"labels": x}, lambda tensor: tensor.clone())
    assert one is two is kwargs["labels"] and one is not x


def test_columns_of_a_table_do_not_bring_all_of_it() -> None:
    table = torch.zeros(100, 1000)
    moves: list[int] = []

    def move(tensor: Tensor) -> Tensor:
        moves.append(tensor.numel())
        return tensor.clone()

    moved_together([table[:, 0], table[:, 7], table[:, 20:30]], move)
    assert sorted(moves) == [100, 100, 1000]


def test_gradients_flow_through_what_is_moved_together() -> None:
    root = torch.ones(3, 4, requires_grad=True)
    left, right = copied(root[:, :3], root[:, 1:])
    (left.sum() + 2 * right.sum()).backward()
    expected = torch.tensor([1.0, 3.0, 3.0, 2.0]).expand(3, 4)
    assert root.grad is not None and torch.equal(root.grad, expected)


def test_nothing_is_moved_that_is_there() -> None:
    text = _text(0)
    given = [text[:, :-1], text[:, 1:]]
    assert all(a is b for a, b in zip(given, moved_together(given, lambda t: t), strict=True))


def test_overlaps_are_those_of_what_is_changed() -> None:
    text, x = _text(0), torch.ones(4)
    args = [text[:, :-1], x, text[:, 1:], x[:2]]
    (found,) = overlaps(args, frozenset({2}), [])
    assert found.members == ((0, 0), (2, 1)) and found.numel == 36
    assert overlaps(args, frozenset(), []) == ()
    assert [found.members for found in overlaps(args, frozenset({3}), [])] == [((3, 0), (1, 0))]


def test_stack_is_planned_as_before() -> None:
    """A model that changes nothing has no look at its inputs' memory."""
    model, inputs = stack()
    streamed = megacompile(model, device="cpu", lowering="eager")
    streamed(**inputs)
    (graph,) = inside.streamed(streamed).graphs
    assert graph.changed == frozenset()
