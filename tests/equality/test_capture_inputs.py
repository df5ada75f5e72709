"""What a forward does to its inputs and buffers: changed in place, shared, or hooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import graph_break

from megacompile import megacompile, schedules
from tests import quantized
from tests.equality.nets import Applies, assert_alike, in_a_row, trained
from tests.zoo import twins

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


GIVEN = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_of_the_user_is_changed(name: str) -> None:
    """Under no_grad a leaf, too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        CHANGES[name](m, x)
        return m.first(x).tanh()

    models = twins(in_a_row(forward, width=WIDTH))
    for is_leaf in (False, False, True)[: 3 if name == "unrecorded" else 2]:

        def use(model: Any, is_leaf: bool = is_leaf) -> Any:
            x = GIVEN.clone().requires_grad_()
            hidden = x if is_leaf else x * 2
            out = model(hidden)
            (out.sum() + hidden.square().sum()).backward()
            return hidden, x.grad

        assert_alike(models, use)


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
        return (m.last(hidden) * gate).square().mean()

    assert_alike(twins(in_a_row(forward, count=3, width=WIDTH)), trained(GIVEN), times=2)


@pytest.mark.filterwarnings("ignore:megacompile")
@pytest.mark.parametrize("kind", ["apart", "shares", "comes back"])
def test_a_sum_that_a_model_adds_to(kind: str) -> None:
    """Its gradients come through the sum alone. What comes to require grad together with a view of
    it runs in eager mode. The sum itself may come back."""

    def forward(m: Any, x: Tensor, total: Tensor, part: Tensor) -> Any:
        out = part * 2
        total += m.first(x)
        return total if kind == "comes back" else out

    def use(model: Any) -> Any:
        total = torch.zeros(5, WIDTH)
        if kind == "comes back":
            total = torch.ones(5, WIDTH, requires_grad=True) + 2
        out = model(GIVEN, total, total[:2] if kind == "shares" else torch.ones(2, WIDTH))
        if kind == "comes back":
            assert out is total
            out.mul_(3)
        (out.sum() + total.square().sum()).backward()
        return total

    assert_alike(twins(in_a_row(forward, count=1, width=WIDTH)), use)


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
    models = language()
    order = [SHARED[name], APART, SHARED[name]]
    for seed, make in enumerate(order[1:] if name == "itself" else order):

        def use(model: Any, seed: int = seed, make: Any = make) -> Any:
            given = text(seed)
            loss = model(*make(given))
            loss.backward()
            return loss, given

        assert_alike(models, use)


@pytest.mark.filterwarnings("ignore:megacompile. Applies")
def test_buffers_that_overlap_and_what_stays_the_same_tensor() -> None:
    """A buffer is counted up in place, an input is given back."""

    def forward(m: Any, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        x = m.first(x)
        m.one += x.detach().mean(0)
        m.counted += 1
        return (m.last(x) * m.other).sum(), seen.add_(x.detach().sum())

    def use(model: Any) -> Any:
        counted, seen = model.counted, torch.zeros(3)
        for _ in range(3):
            loss, given = model(torch.randn(2, 4), seen)
            loss.backward()
            assert given is seen
        assert model.counted is counted and counted[0] == 3
        return seen

    models = []
    for _ in range(2):  # a deepcopy has buffers of their own
        memory = torch.ones(6)
        named: Any = {"one": memory[:4], "other": memory[2:], "counted": torch.zeros(4)}
        models.append(in_a_row(forward, **named))
    megacompile(models[1], device="cpu", lowering="eager")
    assert_alike(models, use)


@pytest.mark.filterwarnings("ignore:megacompile. Applies")
def test_a_view_whose_shape_is_changed_in_place() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2)
        y.unsqueeze_(0)
        return (m.first(x) * y).sum()

    def use(model: Any) -> Any:
        whole = torch.ones(5, 4)
        return model(whole[:4], whole[1:]), whole

    assert_alike(twins(in_a_row(forward, count=1)), use)


# --- the hook of transformers and PEFT that lets inputs require grad


def make_inputs_require_grads(module: Any, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def test_inputs_that_a_hook_lets_require_grad_break_no_graph() -> None:
    """Nor do hooks that pile up capture anything anew: TRL turns checkpoints off and on in every
    step, and transformers adds a hook each time."""
    models = []
    for _ in range(2):
        models.append(quantized.model(quantized.wrapped))
        models[-1].embed.register_forward_hook(make_inputs_require_grads)
    megacompile(models[1], device="cpu", lowering="eager")
    for count in (1, 2, 3):
        losses = [quantized.trained(each, steps=1) for each in models]
        assert all(map(torch.equal, *losses))
        hooks = models[1].embed._forward_hooks
        assert [*hooks.values()] == [make_inputs_require_grads] * count
        for each in models:
            each.embed.register_forward_hook(make_inputs_require_grads)
    (schedule,) = schedules(models[1])
    assert len(schedule.stages) == 5
    seen = torch.tensor([0.0, -0.0, 1.5, float("-inf"), 1e-45])  # what such a hook adds to
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = seen.to(dtype)
        added = given + torch.full((), -0.0)
        assert torch.equal(added.view(torch.uint8), given.view(torch.uint8))
