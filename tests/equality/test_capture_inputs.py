"""What a forward does to its inputs and buffers: changed in place, shared, or hooked.

And what a model gives: odd outputs, and those that are changed in place.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import graph_break

from megacompile import megacompile, schedules
from tests import inside, quantized
from tests.equality.nets import Applies, assert_alike, in_a_row, trained
from tests.zoo import twins

WIDTH = 8


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


WORDS = 12


def language() -> Any:
    """Models that mask their labels in place, before they read their tokens."""

    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 3] = 0
        return F.cross_entropy(m.head(m.embed(tokens)).flatten(0, 1), labels.reshape(-1).long())

    torch.manual_seed(0)
    return twins(Applies(forward, embed=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS)))


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
@pytest.mark.parametrize("name", ["first.weight", "first.bias", "last.bias"])
def test_an_input_in_the_memory_of_a_parameter_is_changed(name: str) -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = m.first(x)
        y.add_(1)
        return m.last(m.first(x)).sum()

    def use(model: Any) -> Any:
        param = model.get_parameter(name)
        before = model(torch.ones(2, 4), torch.zeros_like(param))  # without shared memory
        return before, model(torch.ones(2, 4), param.detach())

    assert_alike(twins(in_a_row(forward)), use)


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


ODD: dict[str, Callable[[Tensor], Any]] = {
    "unfold": lambda y: y.unfold(1, 4, 2),
    "expand": lambda y: y.mean(0, keepdim=True).expand(5, -1),
    "complex": lambda y: torch.fft.rfft(y),
    "as_strided": lambda y: y.as_strided((3, 3, 2), (8, 2, 1)),
    "expand beside": lambda y: (y, y.sum(0).expand_as(y)),
    "conj": lambda y: torch.complex(y[:, :4], y[:, 4:]).conj(),
    "transposed": lambda y: y.t(),
    "sum of a scalar": lambda y: y.square().mean().sum(0),
}


def applied(function: Callable[[Tensor], Any], *, breaks: bool = False, **options: Any) -> Any:
    """A model that gives a function of what its layer gives, plain and streamed."""

    def forward(m: Any, x: Tensor) -> Any:
        found = function(m.first(x))
        if not breaks:
            return found
        graph_break()
        return torch.view_as_real(found).tanh() if found.is_complex() else found.tanh()

    return twins(in_a_row(forward, count=1, width=8), **options)


def of_a_leaf(model: Any) -> Any:
    x = torch.randn(4, 8, requires_grad=True)
    return trained(x)(model), x.grad


def test_odd_outputs() -> None:
    """Elements that share memory, complex ones, and scalars that are reduced."""
    options: dict[str, Any] = {"gpu_memory": "1GiB", "resident": 0, "activations": "recompute"}
    for name, function in ODD.items():
        models = applied(function, **options)
        assert_alike(models, of_a_leaf, name=name)
        assert inside.graphs(models[1]), "nothing was captured"


@pytest.mark.parametrize("name", ["unfold", "expand", "complex"])
def test_odd_values_between_two_graphs(name: str) -> None:
    """Kept for the backward, too."""
    models = applied(ODD[name], breaks=True, activations="keep")
    assert_alike(models, of_a_leaf)
    assert len(inside.graphs(models[1])) == 2


X, MASK = torch.linspace(-1, 1, 8).view(2, 4), torch.tensor([True, False])


def flat_mask(m: Any, x: Tensor) -> Tensor:
    """Puts a parameter where the mask is, behind a graph break."""
    hidden = m.first(x).view(-1, 4)
    graph_break()
    hidden[MASK.view(-1)] = m.token
    return m.last(hidden).square().sum()


def view_divided(m: Any, x: Tensor) -> Tensor:
    """A captured graph of its own has made the view; another one's output is changed outside."""
    hidden = m.first(x)
    graph_break()
    heads = hidden.view(2, 2, 2).transpose(0, 1)
    graph_break()
    heads /= 3.0
    graph_break()
    result: Tensor = m.last(heads.transpose(0, 1).reshape(2, 4))
    return result.square().sum() + m.token.sum()


def dropped(m: Any, x: Tensor) -> Tensor:
    """Where nothing is dropped, a parameter leaves the graph after all."""
    hidden, table = m.first(x), F.dropout(m.token, 0.5, training=False)
    graph_break()
    return (hidden + table).sum()


@pytest.mark.parametrize("forward", [flat_mask, view_divided, dropped])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_what_a_graph_gives_is_changed_behind_it(forward: Callable[..., Any]) -> None:
    models = twins(in_a_row(forward, token=nn.Parameter(torch.ones(4))))
    assert_alike(models, trained(X), times=2)
    with torch.no_grad():
        assert_alike(models, lambda m: m.eval()(X))


VIEWS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # of a buffer, a batch, a value
    "a buffer": lambda scale, batch, hidden: scale.view(2, 3).t()[1:],
    "a view behind the change": lambda scale, batch, hidden: batch.mul_(0.5)[1:, :2],
    "a value": lambda scale, batch, hidden: hidden.view(-1)[2:],
    "overlapping inputs": lambda scale, batch, hidden: scale[1:3],
}


def keeper(kind: str) -> Any:
    """Keeps a view of what the same graph changes in place."""

    def forward(m: Any, x: Tensor, batch: Tensor) -> Tensor:
        hidden = m.first(x)
        graph_break()
        if m.kept is None or kind != "a buffer":
            m.kept = VIEWS[kind](m.scale, batch, hidden)
        m.scale.mul_(0.9)
        batch.add_(1)
        hidden.mul_(batch)
        return (hidden * m.scale[:4]).sum()

    return twins(in_a_row(forward, count=1, scale=torch.linspace(0.5, 1.5, 6), kept=None))


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_what_the_graph_changes_follows_it(kind: str) -> None:
    overlapping = kind == "overlapping inputs"
    models = keeper(kind)
    for rows in (2, 2, 2) if overlapping else (3, 3, 5, 4):

        def use(model: Any, rows: int = rows) -> Any:
            batch = torch.arange(10.0 * rows).view(rows, 10)[:, 1:9:2]
            batch = model.scale[None, :4] if overlapping else batch
            loss = model(torch.linspace(-1, 1, 4 * rows).view(rows, 4), batch)
            if not overlapping:
                loss = loss + model.kept.square().sum()
            loss.backward()
            with torch.no_grad():
                model.kept.detach().mul_(0.5)
            return loss, model.kept, batch

        assert_alike(models, use)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_hook_sees_all_of_the_gradient(breaks: bool) -> None:
    """Behind a graph break, or where no gradient comes through what is computed from the output.
    What else it misses is said: tests/messages."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.first(x)
        if breaks:
            graph_break()
        return m.last(hidden), hidden

    def use(model: Any) -> Any:
        result, hidden = model(torch.ones(3, 4))
        hidden.register_hook(lambda gradient: gradient * 3)
        if breaks:
            hidden.retain_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (hidden + 0 * result if breaks else hidden).sum().backward()
        return hidden.grad if breaks else None

    assert_alike(twins(in_a_row(forward)), use)


def test_what_is_left_in_a_container_is_the_callers() -> None:
    def forward(m: Any, x: Tensor, losses: Any) -> Tensor:
        y: Tensor = m.first(x)
        if isinstance(losses, (list, deque)):
            losses.append(y.square().mean())
        else:
            losses["aux"] = y.square().mean()
        return y

    models = twins(in_a_row(forward, count=1))
    makes: list[Callable[[], Any]] = [list, deque, dict, OrderedDict, lambda: [torch.ones(2)]]
    for make in makes:

        def use(model: Any, make: Callable[[], Any] = make) -> Any:
            for by_name in (False, True):
                losses, x = make(), torch.ones(2, 4)
                y = model(x, losses=losses) if by_name else model(x, losses)
                last = losses["aux"] if isinstance(losses, dict) else losses[-1]
                (y.sum() + last).backward()

        assert_alike(models, use)
