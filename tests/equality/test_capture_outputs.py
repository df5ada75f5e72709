"""What a model gives: odd outputs, those that are changed in place, and what is left elsewhere."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import BackwardError
from megacompile.ir.tensors import TensorMeta
from tests import inside
from tests.draws import drawn
from tests.zoo import assert_same, equal, twins

Function = Callable[[Tensor], Any]

ODD: dict[str, Function] = {
    "unfold": lambda y: y.unfold(1, 4, 2),
    "expand": lambda y: y.mean(0, keepdim=True).expand(5, -1),
    "complex": lambda y: torch.fft.rfft(y),
    "as_strided": lambda y: y.as_strided((3, 3, 2), (8, 2, 1)),
    "expand beside": lambda y: (y, y.sum(0).expand_as(y)),
    "meshgrid": lambda y: torch.meshgrid(y[0], y[1], indexing="ij"),
    "complex beside": lambda y: (torch.fft.rfft(y), y.tanh()),
    "conj": lambda y: torch.complex(y[:, :4], y[:, 4:]).conj(),
    "transposed": lambda y: y.t(),
    "sum of a scalar": lambda y: y.square().mean().sum(0),
    "mean of a scalar": lambda y: y.square().mean().mean(-1),
    "amax of a scalar": lambda y: y.square().mean().amax(0),
    "logsumexp of a scalar": lambda y: y.square().mean().logsumexp(0),
}


class Applies(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function: Function, *, graph_break: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.graph_break = graph_break

    def forward(self, x: Tensor) -> Any:
        found = self.function(self.linear(x))
        if self.graph_break:
            torch._dynamo.graph_break()
            return torch.view_as_real(found).tanh() if found.is_complex() else found.tanh()
        return found


def weighed(found: Any) -> Tensor:
    """A loss that gives each element another gradient."""
    total = torch.zeros(())
    for each in found if isinstance(found, tuple) else (found,):
        real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        weights = torch.arange(1.0, real.numel() + 1).reshape(real.shape)
        total = total + (real * weights).tanh().sum()
    return total


def assert_gradients_same(plain: nn.Module, streamed: nn.Module) -> None:
    """Of the input too."""
    found = []
    for model in (plain, streamed):
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        weighed(model(x)).backward()
        found.append(x.grad)
    assert equal(*found)
    assert_same(plain, streamed)


FIRST = ("unfold", "expand", "complex")  # the others are thorough where they are kept


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        *((name, "recompute") for name in ODD),
        *((name, "keep") for name in FIRST),
        *(
            pytest.param(name, "keep", marks=pytest.mark.thorough)
            for name in ODD
            if name not in FIRST
        ),
    ],
)
def test_odd_outputs(name: str, activations: str) -> None:
    """Elements that share memory, complex ones, and scalars that are reduced."""
    torch.manual_seed(0)
    models = twins(Applies(ODD[name]), gpu_memory="1GiB", resident=0, activations=activations)
    assert_gradients_same(*models)
    assert inside.streamed(models[1]).graphs, "nothing was captured"


@pytest.mark.parametrize("name", FIRST)
def test_odd_values_between_two_graphs(name: str) -> None:
    torch.manual_seed(0)
    models = twins(Applies(ODD[name], graph_break=True))
    assert_gradients_same(*models)
    assert len(inside.streamed(models[1]).graphs) == 2


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


class Masked(nn.Module):
    """Puts a parameter where the mask is, behind a graph break."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        other = hidden * 2
        if self.kind == "flat":
            hidden, mask = hidden.view(-1, 4), mask.view(-1)
        torch._dynamo.graph_break()
        hidden[mask] = self.token
        if self.kind == "both":
            other.mul_(3)
        total: Tensor = self.last(hidden).square().sum() + other.sum()
        return total


@pytest.mark.parametrize("kind", drawn(["flat", "both"], ["batched"]))
@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_parameter_is_written_through_a_mask(kind: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Masked(kind))
    x, mask = torch.randn(2, 3, 4), torch.rand(2, 3) > 0.5
    for _ in range(2):
        losses = [model(x, mask) for model in (plain, streamed)]
        assert equal(*(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
        assert_same(plain, streamed)


@pytest.mark.parametrize("flat", [False, True])
def test_an_output_that_the_backward_needs(flat: bool) -> None:
    """Of an exponential, or a view of it: changed, it is refused as plain autograd refuses it."""
    plain, streamed = twins(Applies(lambda y: y.exp().flatten() if flat else y.exp()))
    for model, error in ((plain, RuntimeError), (streamed, BackwardError)):
        out = model(torch.ones(2, 8))
        out.mul_(2)
        with pytest.raises(error, match="in.?place"):
            out.sum().backward()
    for model in (plain, streamed):
        (model(torch.ones(2, 8)) * 2).sum().backward()
    assert_same(plain, streamed)


class Scaled(nn.Module):
    """Divides in place what a captured graph of its own has made a view of, and gives that on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        heads = hidden.view(2, 2, 2).transpose(0, 1)
        torch._dynamo.graph_break()
        heads /= 3.0
        torch._dynamo.graph_break()
        result: Tensor = self.last(heads.transpose(0, 1).reshape(2, 4))
        return result


def test_an_output_that_the_backward_does_not_need() -> None:
    """It may be changed: its backward takes no value, be it of a view or of a product."""
    torch.manual_seed(0)
    plain, streamed = twins(Scaled())
    x = torch.randn(2, 4)
    for model in (plain, streamed):
        out = model(x)
        out.mul_(2).add_(1)
        out.square().sum().backward()
    assert_same(plain, streamed)


class Dropped(nn.Module):
    """Drops out of a parameter: in eval that is the parameter itself, which leaves the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, table = self.layer(x), F.dropout(self.table, 0.5, self.training)
        torch._dynamo.graph_break()
        total: Tensor = hidden + table
        return total


def test_a_parameter_is_an_output_after_all() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Dropped().eval())
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert equal(plain(x), streamed(x))
    outputs = [model(x) for model in (plain, streamed)]
    assert equal(*(output.detach() for output in outputs))
    for output in outputs:
        output.sum().backward()
    assert_same(plain, streamed)


# --- views that are kept


class Keeper(nn.Module):
    """Keeps a view of a buffer, of a batch or of a value, which the same graph changes in place."""

    scale: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.kind = kind
        self.kept: Any = None

    def note(self, gradient: Tensor) -> None:
        self.scale.add_(gradient.sum())

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        hidden = self.layer(x)
        torch._dynamo.graph_break()
        if self.kept is None or self.kind != "a buffer":
            views: dict[str, Callable[[], Tensor]] = {
                "a buffer": lambda: self.scale.view(2, 3).t()[1:],
                "a batch with gaps": lambda: batch.t()[1:],
                "a view behind the change": lambda: batch.mul_(0.5)[1:, :2],
                "a value": lambda: hidden.view(-1)[2:],
                "a detached value": lambda: hidden.detach().t(),
                "overlapping inputs": lambda: self.scale[1:3],
            }
            self.kept = views[self.kind]()
        self.scale.mul_(0.9)
        batch.add_(1)
        hidden.mul_(batch)
        total: Tensor = (hidden * self.scale[:4]).sum()
        return total


KINDS = ("a buffer", "a batch with gaps", "a view behind the change", "a value", "a detached value")


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [(kind, None) for kind in KINDS]
    + [pytest.param(kind, True, marks=pytest.mark.thorough) for kind in KINDS],
)
def test_a_view_of_what_the_graph_changes_follows_it(kind: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    models = twins(Keeper(kind), dynamic=dynamic)
    for rows in (3, 3, 5, 4):
        shown = []
        for model in models:
            x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
            batch = torch.arange(10.0 * rows).view(rows, 10)[:, 1:9:2]
            loss = model(x, batch)
            (loss + model.kept.square().sum()).backward()
            with torch.no_grad():
                model.kept.detach().mul_(0.5)
            shown.append([loss.detach(), model.kept.detach(), batch, *model.buffers()])
        assert all(map(equal, *shown))
        assert_same(*models)


def test_a_view_of_inputs_that_overlap_follows_them() -> None:
    torch.manual_seed(0)
    models = twins(Keeper("overlapping inputs"))
    shown = []
    for model in models:
        for _ in range(3):
            batch = model.scale[None, :4]
            loss = model(torch.ones(2, 4), batch)
            loss.backward()
        shown.append([loss.detach(), model.kept, model.scale])
    assert all(map(equal, *shown))


def test_a_view_of_what_a_backward_writes_follows_it() -> None:
    class Written(Keeper):
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            hidden = torch.tanh(self.layer(x))
            hidden.register_hook(self.note)
            if self.kept is None:
                self.kept = self.scale[:4]
            total: Tensor = (hidden * self.kept * self.scale[2:]).sum()
            return total

    torch.manual_seed(0)
    models = twins(Written(""))
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 4), torch.ones(2, 4)).backward()
        assert equal(*(model.kept for model in models))
        assert_same(*models)


# --- hooks on outputs from which the graph computes others


class Two(nn.Module):
    """Gives what it computes, and what it computes that from."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden), hidden


@pytest.mark.parametrize("breaks", [False, True])
def test_a_hook_sees_all_of_the_gradient(breaks: bool) -> None:
    """Behind a graph break, or where no gradient comes through what is computed from the output.
    What else it misses is said: tests/messages."""
    torch.manual_seed(0)
    plain, streamed = twins(Two(breaks))
    kept = []
    for model in (plain, streamed):
        result, hidden = model(torch.ones(3, 4))
        hidden.register_hook(lambda gradient: gradient * 3)
        if breaks:
            hidden.retain_grad()
            hidden = hidden + 0 * result
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hidden.sum().backward()
        kept.append(hidden.grad)
    assert equal(*kept)
    assert_same(plain, streamed)


# --- lists and dicts that a forward is given, and changes


class Leaves(nn.Module):
    """Leaves something in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        y: Tensor = self.linear(x)
        if isinstance(losses, (list, deque)):
            losses.append(y.square().mean())
        else:
            losses["aux"] = y.square().mean()
        return y


def test_what_is_left_in_a_container_is_the_callers() -> None:
    plain, streamed = twins(Leaves())
    x = torch.ones(2, 4)
    makes: list[Callable[[], Any]] = [list, deque, dict, OrderedDict, lambda: [torch.ones(2)]]
    for make in makes:
        for by_name in (False, True):
            for model in (plain, streamed):
                losses = make()
                y = model(x, losses=losses) if by_name else model(x, losses)
                last = losses["aux"] if isinstance(losses, dict) else losses[-1]
                (y.sum() + last).backward()
            assert_same(plain, streamed)
