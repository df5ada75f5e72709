"""Small models for the tests, a function each: gives the model and the keyword inputs of a call.

Each model returns its loss, alone or in an output with `.loss`. Seeds are fixed, so two calls give
equal models and equal inputs. `twins` gives a model and its plain copy; `same` compares bitwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.ir.schedule import Schedule

Inputs = dict[str, Any]
Made = tuple[Any, Inputs]  # the model is Any: tests reach into its layers

WIDTH = 16
BATCH = 4


def twins(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """(a plain copy, the model megacompiled on the CPU with eager lowering)."""
    plain = copy.deepcopy(model)
    return plain, megacompile(model, **{"device": "cpu", "lowering": "eager", **options})


def uncompiled(module: Any, inputs: Any) -> Any:
    """Stands in for Inductor: a stage runs as it is."""
    return lambda *given: module(*(given[0] if isinstance(given[0], list) else given))


def loss_of(output: Any) -> Tensor:
    """The loss in what a model of this file returns."""
    return output if isinstance(output, Tensor) else output.loss


def step(model: nn.Module, inputs: Mapping[str, Any], *, seed: int = 0) -> Tensor:
    """One forward and backward; gives the loss. The seed is for dropout."""
    torch.manual_seed(seed)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach()


def differences(plain: nn.Module, streamed: nn.Module) -> list[str]:
    """Names of parameters, gradients and buffers that are not equal in every bit."""
    found = []
    pairs = zip(
        plain.named_parameters(remove_duplicate=False),
        streamed.named_parameters(remove_duplicate=False),
        strict=True,
    )
    for (name, mine), (other_name, theirs) in pairs:
        assert name == other_name
        if not equal(mine.detach(), theirs.detach()):
            found.append(name)
        if not equal(mine.grad, theirs.grad):
            found.append(f"{name}.grad")
    buffers = zip(plain.named_buffers(), streamed.named_buffers(), strict=True)
    found += [name for (name, a), (_, b) in buffers if not equal(a, b)]
    return found


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Bitwise equal, NaN for NaN, wherever they lie; or both None."""
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(torch.isnan(a), torch.isnan(b))
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    )


def same(a: Any, b: Any, rtol: float = 0.0) -> bool:
    """Are two values equal in every bit, or but for rounding?"""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.detach(), b.detach()
        rounded = rtol and a.shape == b.shape and a.is_floating_point()
        if rounded:
            return torch.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True)
        return equal(a, b)
    if hasattr(a, "__array__") and hasattr(b, "__array__"):
        return same(torch.as_tensor(a), torch.as_tensor(b), rtol)
    return bool(a == b) or bool(rtol and isinstance(a, float) and abs(a - b) <= rtol)


def difference(a: Any, b: Any, rtol: float = 0.0, path: str = "") -> str:
    """Where nested containers differ first; "" where they are equal."""
    found: list[str] = []
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        found = [difference(x, y, rtol, f"{path}[{i}]") for i, (x, y) in pairs]
    elif isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        found = [difference(a[k], b[k], rtol, f"{path}.{k}") for k in a]
    elif not same(a, b, rtol):
        found = [f"{path}: {a} and {b}"]
    return next(filter(None, found), "")


def unlike(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    """The names of what is missing, or other in any bit."""
    names = [*want, *(name for name in got if name not in want)]
    return [n for n in names if n not in want or n not in got or not equal(want[n], got[n])]


def assert_close(plain: nn.Module, streamed: nn.Module, tolerance: float = 1e-6) -> None:
    """Every parameter, but for rounding: relative to its norm."""
    pairs = zip(plain.named_parameters(), streamed.parameters(), strict=True)
    for (name, want), got in pairs:
        error = float((got - want).detach().norm())
        assert error <= tolerance * float(want.detach().norm()), name


def batch(seed: int = 1, *, size: int = BATCH) -> Inputs:
    """`x` and `y` for the models below that are no language models."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, WIDTH, generator=generator),
        "y": torch.randn(size, WIDTH, generator=generator),
    }


def tokens(seed: int = 1, *, size: int = 2, length: int = 8, vocabulary: int = 64) -> Inputs:
    """`input_ids` and `labels` for the language models."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    """A pre-norm saved value layer."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks between two projections; gives the loss where it gets `y`, else the prediction."""

    def __init__(
        self,
        *,
        layers: int = 3,
        block: Callable[[], nn.Module] = Block,
        between: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.embed(x)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if self.between is not None:
                hidden = self.between(i, hidden)
        prediction: Tensor = self.head(hidden)
        return prediction if y is None else F.mse_loss(prediction, y)


class Language(nn.Module):
    """An embedding, layers and a head, which may be tied to it; gives the loss of its own words."""

    def __init__(
        self, words: int, width: int, layers: Iterable[nn.Module], *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        scores = scores if scores.dtype is torch.float64 else scores.float()
        return F.cross_entropy(scores.flatten(0, -2), ids.flatten())


class Tower(nn.Module):
    """Layers, each of which `way` applies to the value so far; gives the mean of the squares."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        way: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.way(layer, x)
        return x.square().mean()


def stacks(**options: Any) -> tuple[Any, Any, Inputs]:
    """`stack` as a plain model and megacompiled, and inputs."""
    model, inputs = stack()
    return *twins(model, **options), inputs


def assert_same(plain: nn.Module, streamed: nn.Module) -> None:
    """Parameters, gradients and buffers: the same bits, and None where plain has None."""
    assert differences(plain, streamed) == []


def assert_steps_same(plain: nn.Module, streamed: nn.Module, inputs: Inputs) -> None:
    """A forward and backward of both gives the same loss and gradients."""
    assert equal(step(plain, inputs), step(streamed, inputs))
    assert_same(plain, streamed)


def scheduled(model: nn.Module | None = None, **options: Any) -> Schedule:
    """The schedule of a streamed `stack`, or of another model that takes `batch()`."""
    _, streamed = twins(stack()[0] if model is None else model, **options)
    step(streamed, batch())
    return schedules(streamed)[0]


def _break(i: int, hidden: Tensor) -> Tensor:
    if i == 1:
        torch._dynamo.graph_break()
    return hidden


def stack() -> Made:
    torch.manual_seed(0)
    return Stack(), batch()


def batchnorm() -> Made:
    """An MLP with BatchNorm: buffers change in the forward."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    torch.manual_seed(0)
    return Stack(block=layer), batch()


def dropout() -> Made:
    torch.manual_seed(0)
    return Stack(block=lambda: Block(dropout=0.3)), batch()


def unused() -> Made:
    """Parameters that the forward never reads, in a layer and beside the layers."""
    model, inputs = stack()
    model.layers[1].extra = nn.Parameter(torch.ones(3))
    model.spare = nn.Linear(2, 2)
    return model, inputs


def tied() -> Made:
    """The head is the embedding, transposed (a token model with tied weights)."""
    model, inputs = stack()
    model.head.weight = model.embed.weight
    return model, inputs


def mixed() -> Made:
    """One parameter is frozen, others get no gradient."""
    model, inputs = unused()
    model.layers[0].norm.weight.requires_grad_(False)
    return model, inputs


def graph_break() -> Made:
    """Dynamo breaks the graph between the layers."""
    torch.manual_seed(0)
    return Stack(between=_break), batch()
