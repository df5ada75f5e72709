"""What a model gives: odd outputs, those that are changed in place, and what is left elsewhere."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch.nn import functional as F

from megacompile import BackwardError
from megacompile.ir.tensors import TensorMeta
from tests import inside
from tests.equality.nets import assert_alike, in_a_row, trained
from tests.zoo import twins

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


def test_metas_that_overlap() -> None:
    def meta(shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorMeta:
        return TensorMeta(shape, torch.float32, stride)

    assert meta((2, 3), (0, 1)).overlaps_itself
    assert meta((3, 4), (2, 1)).overlaps_itself
    assert not meta((3, 4), (1, 3)).overlaps_itself
    assert not meta((3, 4), (8, 1)).overlaps_itself, "rows of a larger one"
    assert not meta((1, 4), (0, 1)).overlaps_itself, "one row"
    assert not meta((), ()).overlaps_itself
    assert meta((2, 3, 4), (0, 1, 3)).contiguous().stride == (12, 4, 1)


# --- changed in place behind the graph

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


@pytest.mark.parametrize("flat", [False, True])
def test_an_output_that_the_backward_needs(flat: bool) -> None:
    """Changed, it is refused as plain autograd does; what no backward needs may be changed."""
    models = applied(lambda y: y.exp().flatten() if flat else y.exp())
    for model, error in zip(models, (RuntimeError, BackwardError), strict=True):
        out = model(torch.ones(2, 8))
        out.mul_(2)
        with pytest.raises(error, match="in.?place"):
            out.sum().backward()
    assert_alike(models, lambda m: (m(torch.ones(2, 8)) * 2).sum().backward())
    models = applied(lambda y: y)
    assert_alike(models, lambda m: m(torch.ones(2, 8)).mul_(2).add_(1).square().sum().backward())


# --- views that are kept

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


# --- hooks on outputs from which the graph computes others


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


# --- lists and dicts that a forward is given, and changes


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
