"""What a backward changes in place is changed: by hooks, and by `autograd.Function`s."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, AdamW

import megacompile as mc
from megacompile import megacompile
from megacompile.errors import BackwardError, DeviceMemoryError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.runtime.ops.bound import BoundOps
from megacompile.verify.proof import hazards
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


class Delayed(Layer):
    """fp8 with delayed scaling: a scale is of what earlier steps have seen."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("x", "w", "g"):
            self.register_buffer(f"scale_{name}", torch.ones(()))
            self.register_buffer(f"history_{name}", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        of: Any = self
        with torch.no_grad():
            scaled_by(of.history_x, of.scale_x, x)
            scaled_by(of.history_w, of.scale_w, self.linear.weight)
        kind: Any = Product
        y: Tensor = kind.apply(
            x, self.linear.weight, of.scale_x, of.scale_w, of.history_g, of.scale_g
        )
        return (y + self.linear.bias).tanh()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, history: Tensor, scale: Tensor
    ) -> Tensor:
        x, w = cast(x, sx), cast(w, sw)
        ctx.save_for_backward(x, w)
        ctx.history, ctx.scale = history, scale
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        scaled_by(ctx.history, ctx.scale, grad)
        grad = cast(grad, ctx.scale)
        return grad @ w, grad.t() @ x, None, None, None, None


def scaled_by(history: Tensor, scale: Tensor, tensor: Tensor) -> None:
    scale.copy_(history.amax().clamp(min=1e-3))
    history.copy_(history.roll(1))
    history[0].copy_(tensor.detach().abs().amax())


def cast(tensor: Tensor, scale: Tensor) -> Tensor:
    narrow = (tensor / scale * 448).clamp(-448, 448).to(torch.float8_e4m3fn)
    return narrow.to(tensor.dtype) * scale / 448


LAYERS = [
    Notes,
    ReadsBack,
    Fills,
    Both,
    PartOfABuffer,
    PartThatIsABuffer,
    Attribute,
    FunctionLayer,
    Operator,
    Delayed,
]


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], calls: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.calls = calls

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


def pair(layer: Callable[[], nn.Module], calls: int = 1, **options: Any) -> tuple[Any, Any]:
    """The plain model, and a megacompiled one; nothing of it may run in eager mode."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(layer, calls))
    warnings.filterwarnings("error", message="megacompile.*eager mode")
    options = {"lowering": "eager", "progress": False, **options}
    return models[0], megacompile(models[1], **options)


def check(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() <= theirs.keys()
    assert [name for name in mine if not equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("micro", [1, 2])
def test_every_kind(layer: Callable[[], nn.Module], micro: int) -> None:
    plain, model = pair(layer)
    check(steps(model, micro=micro), steps(plain, micro=micro))


@pytest.mark.parametrize("layer", [ReadsBack, Both, Delayed])
@pytest.mark.parametrize(
    "options",
    [
        {"resident": 0},
        {"resident": "all"},
        {"activations": "recompute"},
        {"activations": "offload"},
        {"activations": "keep"},
        {"slots": 2, "lookahead": 1},
        {"detect_anomaly": True},
    ],
    ids=str,
)
def test_every_mode(layer: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Each layer is called twice: the two stages share their buffers."""
    plain, model = pair(layer, calls=2, **options)
    check(steps(model), steps(plain))


def test_an_update_in_the_backward() -> None:
    torch.manual_seed(0)
    plain, other = Net(ReadsBack), Net(ReadsBack)
    other.load_state_dict(plain.state_dict())
    mine, theirs = (SGD(m.parameters(), lr=0.1) for m in (other, plain))
    model = megacompile(other, lowering="eager", optimizer=mine, progress=False)
    found, wanted = steps(model, optimizer=mine), steps(plain, optimizer=theirs)
    for name, value in found.items():  # an update in the backward rounds otherwise
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"activations": "recompute", "resident": 0}], ids=str)
def test_random_numbers_of_a_hook(options: dict[str, Any]) -> None:
    """They are drawn in the backward, last layer first, and not with those of the forward."""

    class Draws(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

        def hook(self, grad: Tensor) -> Tensor:
            self.amax.copy_(torch.rand(()))
            return grad * (torch.rand(WIDTH) + self.amax)

    plain, model = pair(Draws, **options)
    torch.manual_seed(1)
    mine = steps(model)
    torch.manual_seed(1)
    check(mine, steps(plain))


def test_with_inductor() -> None:
    plain, model = pair(ReadsBack, lowering="inductor")
    mine, theirs = steps(model), steps(plain)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4)
    assert model.layers[0].seen.count_nonzero() == 3


@pytest.mark.parametrize("layer", [ReadsBack, Both, Delayed])
def test_sizes_that_change(layer: Callable[[], nn.Module]) -> None:
    plain, model = pair(layer)
    for rows in (3, 5, 4, 7):
        for each in (plain, model):
            each(inputs(rows, rows)).backward()
        check(dict(tensors(model)), dict(tensors(plain)))


@pytest.mark.parametrize("layer", [ReadsBack, Delayed])
def test_a_graph_that_is_retained_is_written_twice(layer: Callable[[], nn.Module]) -> None:
    plain, model = pair(layer)
    for each in (plain, model):
        loss = each(inputs(0))
        loss.backward(retain_graph=True)
        loss.backward()
    check(dict(tensors(model)), dict(tensors(plain)))
    check(*({n: p.grad for n, p in m.named_parameters()} for m in (model, plain)))


@pytest.mark.parametrize("layer", [ReadsBack, Delayed])
def test_two_forwards_before_their_backwards(layer: Callable[[], nn.Module]) -> None:
    """A backward reads what is in the buffer then, a recompute what was there in its forward."""
    plain, model = pair(layer, activations="recompute")
    for each in (plain, model):
        first, second = each(inputs(0)), each(inputs(1))
        first.backward()
        second.backward()
    check(dict(tensors(model)), dict(tensors(plain)))
    check(*({n: p.grad for n, p in m.named_parameters()} for m in (model, plain)))


def test_a_buffer_that_layers_share() -> None:
    """What the backward of a layer writes, that of the layer before reads."""

    def sharing() -> Callable[[], nn.Module]:
        shared = torch.zeros(3)

        def layer() -> nn.Module:
            made = ReadsBack()
            made.seen = shared
            return made

        return layer

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(sharing()))
    plain, other = models
    model = megacompile(other, lowering="eager", progress=False, resident=0)
    check(steps(model), steps(plain))


def test_an_input_of_the_model() -> None:
    class Gives(Notes):
        def forward(self, x: Tensor, into: Tensor) -> Tensor:  # type: ignore[override]
            hidden: Tensor = self.linear(x)
            hidden.register_hook(lambda grad: into.add_(grad).sum() and None)
            return hidden.tanh()

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


def test_behind_a_graph_break() -> None:
    class Breaks(ReadsBack):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y * 2

    plain, model = pair(Breaks)
    check(steps(model), steps(plain))


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
        (lambda: Net(ChangesAParameter), "parameter 'layers.2.linear.bias'"),
        (lambda: ChangesWhatALayerGave(Notes), "a tensor from another layer"),
    ],
)
def test_what_else_is_written_runs_in_eager_mode(make: Callable[[], nn.Module], what: str) -> None:
    plain, other = make(), make()
    other.load_state_dict(plain.state_dict())
    model = megacompile(other, lowering="eager", progress=False)
    with pytest.warns(UserWarning, match=f"eager mode.*autograd.Function, changes {what} in place"):
        mine = steps(model)
    check(mine, steps(plain))


def test_a_backward_that_ran_out_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writes would be made twice."""
    _, model = pair(Notes, gpu_memory=2**20)
    model(inputs(0)).backward()
    monkeypatch.setattr(BoundOps, "assign", _runs_out)
    with pytest.raises(DeviceMemoryError, match="it changes buffers"):
        model(inputs(1)).backward()


def _runs_out(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("planted: out of memory")


# The proof.


def schedule() -> Schedule:
    """Of three layers whose backward writes two buffers each."""
    _, model = pair(ReadsBack, resident=0)
    model(inputs(0)).backward()
    return mc.schedules(model)[0]


def broken(change: Callable[[list[fx.Node]], None]) -> list[str]:
    """What `verify` says of a schedule of which the assigns in the backward are changed."""
    found = schedule().fresh()
    assert not hazards(found)
    assert found.backward is not None
    change(ops.nodes_of(found.backward, ops.assign))
    return [str(hazard) for hazard in hazards(found)]


def test_a_write_that_is_lost_is_found() -> None:
    def drop(assigns: list[fx.Node]) -> None:
        assigns[0].graph.erase_node(assigns[0])

    assert any("new value is not written there" in text for text in broken(drop))


def test_a_write_to_another_input_is_found() -> None:
    def swap(assigns: list[fx.Node]) -> None:
        (one, new), (other, others_new) = assigns[0].args, assigns[1].args
        assigns[0].args, assigns[1].args = (one, others_new), (other, new)

    assert any("whose new value it is not" in text for text in broken(swap))


def test_the_print_has_the_write() -> None:
    text = str(schedule())
    assert text.count("assign(") == 6
    assert replace(schedule()).written
    with pytest.raises(BackwardError, match="second time"):
        _, model = pair(Notes)
        loss = model(inputs(0))
        loss.backward()
        loss.backward()
