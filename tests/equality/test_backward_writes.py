"""What a backward changes in place is changed: by hooks, and by `autograd.Function`s."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, AdamW

import megacompile as mc
from megacompile import megacompile
from megacompile.errors import BackwardError, DeviceMemoryError
from megacompile.ir import ops
from megacompile.verify.proof import hazards
from tests.interrupts import traced
from tests.stateful.late import AtCall
from tests.zoo import equal

WIDTH = 4


class Layer(nn.Module):
    """(rows, WIDTH) -> (rows, WIDTH); the subclasses' backwards write."""

    amax: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("amax", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x) * (1 + self.amax)
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        return hidden.tanh()

    def hook(self, grad: Tensor) -> Tensor | None:
        raise NotImplementedError


class Notes(Layer):
    def hook(self, grad: Tensor) -> None:
        self.amax.copy_(grad.abs().amax())


class ReadsBack(Layer):
    """Its gradients depend on what the backward before has left."""

    def hook(self, grad: Tensor) -> Tensor:
        scaled = grad / (1 + self.amax + self.seen.max())
        self.seen.copy_(self.seen.roll(1))
        self.seen[0].copy_(grad.abs().amax())
        self.amax.copy_(self.seen.max())
        return scaled


class Fills(Layer):
    """What it writes depends on nothing: it is written in the backward all the same."""

    def hook(self, grad: Tensor) -> None:
        self.amax.fill_(0.5)


class Both(Layer):
    """Forward and backward change one buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.amax.add_(1)
        return super().forward(x) * (self.amax + 0.5)

    def hook(self, grad: Tensor) -> Tensor:
        self.amax.mul_(0.5)
        return grad * self.amax


class PartOfABuffer(Layer):
    """Through a view that the forward has made."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x) * (1 + self.seen.sum())
        first = self.seen[0]

        def hook(grad: Tensor) -> Tensor:
            first.copy_(grad.abs().amax())
            return grad / (1 + self.seen.sum())

        hidden.register_hook(hook)
        return hidden.tanh()


class PartThatIsABuffer(Layer):
    """Two buffers share memory, and the backward writes through both."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.seen[1])

    def hook(self, grad: Tensor) -> Tensor:
        self.row.copy_(grad.abs().amax())
        self.seen[0].add_(self.row)
        return grad / (1 + self.seen.sum())


class Attribute(Layer):
    """A tensor that is no buffer, which a function has closed over."""

    def __init__(self) -> None:
        super().__init__()
        kept = torch.zeros(())
        self.kept: Callable[[], Tensor] = lambda: kept

    def hook(self, grad: Tensor) -> None:
        self.kept().copy_(grad.abs().amax())


class FunctionLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        kind: Any = Changes
        y: Tensor = kind.apply(self.linear(x).tanh(), self.amax, self.seen)
        return y * (1 + self.amax)


class Changes(torch.autograd.Function):
    """Keeps tensors, one by itself and one saved, and changes both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, seen: Tensor) -> Tensor:
        ctx.amax = amax
        ctx.save_for_backward(seen)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (seen,) = ctx.saved_tensors
        seen[0].add_(1)
        ctx.amax.copy_(grad.abs().amax() * seen.sum())
        return grad * 2 / seen.sum(), None, None


@torch.library.custom_op("megacompile_tests::note", mutates_args={"amax"})
def note(grad: Tensor, amax: Tensor) -> Tensor:
    amax.copy_(grad.abs().amax())
    return grad * 2


@note.register_fake
def _(grad: Tensor, amax: Tensor) -> Tensor:
    return torch.empty_like(grad)


class Operator(Layer):
    def hook(self, grad: Tensor) -> Tensor:
        noted: Tensor = note(grad, self.amax)
        return noted


LAYERS = [
    *(Notes, ReadsBack, Fills, Both, PartOfABuffer, PartThatIsABuffer),
    *(Attribute, FunctionLayer, Operator),
]


class Breaks(ReadsBack):
    """Two captured graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2


class Draws(Layer):
    """Random numbers are drawn in the backward too, not with those of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))

    def hook(self, grad: Tensor) -> Tensor:
        self.amax.copy_(torch.rand(()))
        return grad * (torch.rand(WIDTH) + self.amax)


class Net(nn.Module):
    """Layers of these kinds; those of one kind may share a buffer."""

    def __init__(
        self, *kinds: Callable[[], nn.Module], calls: int = 1, shares: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.calls = calls
        if shares:
            for layer in self.layers:
                layer.seen = self.layers[0].seen

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x)
        return x.square().sum()


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach().clone()
    for name, module in model.named_modules():
        if isinstance(module, Attribute):
            yield f"{name}.kept", module.kept().clone()


def steps(model: Any, *, optimizer: Any = None, count: int = 3, micro: int = 1) -> dict[str, Any]:
    """Losses, gradients and, at last, all tensors."""
    gradients = optimizer is None  # else they never leave the device
    if optimizer is None:
        optimizer = AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    for step in range(count):
        for k in range(micro):
            loss = model(inputs(step + 10 * k))
            loss.backward()
            found[f"{step}.{k}.loss"] = loss.detach().clone()
        for name, param in model.named_parameters() if gradients else ():
            if param.grad is not None:
                found[f"{step}.{name}.grad"] = param.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | dict(tensors(model))


def inputs(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair(*kinds: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """The plain model, and a megacompiled one; nothing of it may run in eager mode."""
    calls, shares = options.pop("calls", 1), options.pop("shares", False)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(*kinds, calls=calls, shares=shares))
    warnings.filterwarnings("error", message="megacompile.*eager mode")
    options = {"lowering": "eager", "progress": False, **options}
    return models[0], megacompile(models[1], **options)


def check(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() <= theirs.keys()
    assert [name for name in mine if not equal(mine[name], theirs[name])] == []


def grads(model: Any) -> dict[str, Any]:
    return {n: p.grad for n, p in model.named_parameters()}


def test_every_kind() -> None:
    """All in one model: alone, in micro-batches, and with sizes that change."""
    plain, model = pair(*LAYERS)
    check(steps(model), steps(plain))
    check(steps(model, micro=2), steps(plain, micro=2))
    for rows in (5, 4, 7):
        for each in (plain, model):
            each(inputs(rows, rows)).backward()
        check(dict(tensors(model)), dict(tensors(plain)))
    check(grads(model), grads(plain))


@pytest.mark.parametrize(
    "options",
    [
        {"resident": "all"},
        {"activations": "recompute", "resident": 0},
        {"activations": "offload"},
        {"activations": "keep", "detect_anomaly": True},
    ],
    ids=str,
)
def test_every_mode(options: dict[str, Any]) -> None:
    """Each layer is called twice: the two stages share their buffers."""
    plain, model = pair(ReadsBack, Both, Operator, Draws, calls=2, **options)
    check(steps(model), steps(plain))


@pytest.mark.parametrize("options", [{}, {"shares": True, "resident": 0}], ids=str)
def test_graphs_that_are_kept(options: dict[str, Any]) -> None:
    """One that is retained is written twice. Of two forwards before their backwards, a backward
    reads what is in the buffer then, a recompute what was there in its forward."""
    kinds = [ReadsBack] * 3 if options else [ReadsBack, Operator, Breaks]
    plain, model = pair(*kinds, activations="recompute", **options)
    for each in (plain, model):
        loss = each(inputs(0))
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = each(inputs(0)), each(inputs(1))
        first.backward()
        second.backward()
        with pytest.raises((RuntimeError, BackwardError)):
            second.backward()
    check(dict(tensors(model)), dict(tensors(plain)))
    check(grads(model), grads(plain))


def test_an_update_in_the_backward() -> None:
    torch.manual_seed(0)
    plain, other = Net(ReadsBack, Notes), Net(ReadsBack, Notes)
    other.load_state_dict(plain.state_dict())
    mine, theirs = (SGD(m.parameters(), lr=0.1) for m in (other, plain))
    model = megacompile(other, lowering="eager", optimizer=mine, progress=False)
    found, wanted = steps(model, optimizer=mine), steps(plain, optimizer=theirs)
    for name, value in found.items():  # an update in the backward rounds otherwise
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


class Gives(Notes):
    """Its backward writes to an input of the model."""

    def forward(self, x: Tensor, into: Tensor) -> Tensor:  # type: ignore[override]
        hidden: Tensor = self.linear(x)
        hidden.register_hook(lambda grad: into.add_(grad).sum() and None)
        return hidden.tanh()


def test_an_input_of_the_model() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer: Any = Gives()
        model = megacompile(layer, lowering="eager", progress=False) if compiled else layer
        into = torch.zeros(3, WIDTH)
        for _ in range(2):
            model(inputs(0), into).sum().backward()
        found.append(into)
    assert equal(*found)
    assert found[0].count_nonzero()


class ChangesAParameter(Layer):
    def hook(self, grad: Tensor) -> None:
        with torch.no_grad():
            self.linear.bias.mul_(0.5)


class ChangesWhatALayerGave(Net):
    """A hook of the last layer changes what the first one gave."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        given = x.detach() * 1
        x = self.layers[2](self.layers[1](x))

        def hook(grad: Tensor) -> Tensor:
            given.mul_(2)
            return grad * given

        x.register_hook(hook)
        return x.square().sum()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Net(ChangesAParameter), "layers.0.linear.bias"),
        (lambda: ChangesWhatALayerGave(Notes, Notes, Notes), "another layer"),
    ],
)
def test_what_else_is_written_runs_in_eager_mode(make: Callable[[], nn.Module], what: str) -> None:
    plain, other = make(), make()
    other.load_state_dict(plain.state_dict())
    model = megacompile(other, lowering="eager", progress=False)
    with pytest.warns(UserWarning, match=what):
        mine = steps(model)
    check(mine, steps(plain))


def test_a_backward_that_ran_out_is_not_repeated() -> None:
    """Its writes would be made twice."""
    _, model = pair(Notes, gpu_memory=2**20)
    model(inputs(0)).backward()
    loss = model(inputs(1))
    with (
        pytest.raises(DeviceMemoryError),
        traced(AtCall("assign", 1, torch.OutOfMemoryError("planted: out of memory"))),
    ):
        loss.backward()


def test_writes_that_are_lost_or_swapped_are_found() -> None:
    """By the proof of the schedule of layers whose backward writes two buffers each."""
    _, model = pair(ReadsBack, ReadsBack, ReadsBack, resident=0)
    model(inputs(0)).backward()
    schedule = mc.schedules(model)[0]
    assert str(schedule).count("assign(") == 6 and schedule.written

    def drop(assigns: list[fx.Node]) -> None:
        assigns[0].graph.erase_node(assigns[0])

    def swap(assigns: list[fx.Node]) -> None:
        (one, new), (other, others_new) = assigns[0].args, assigns[1].args
        assigns[0].args, assigns[1].args = (one, others_new), (other, new)

    for change in (drop, swap):
        broken = schedule.fresh()
        assert not hazards(broken) and broken.backward is not None
        change(ops.nodes_of(broken.backward, ops.assign))
        assert hazards(broken), change.__name__
