"""`torch.compile` around a megacompiled model: it leaves the model as it is, which is said once.

The plain model runs without `torch.compile`, and its numbers are compared in every bit.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import schedules
from tests import inside
from tests.zoo import Inputs, assert_same, equal, stacks

BACKEND = "aot_eager"
Around = Callable[[nn.Module, torch.optim.Optimizer, Inputs], Callable[[], Tensor]]


def _train(call: Callable[..., Any], optimizer: torch.optim.Optimizer, inputs: Inputs) -> Tensor:
    loss: Tensor = call(**inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Loss:
    """A loss of what the model gives."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Tensor:
        loss: Tensor = self.model(**inputs) * 2 + 1
        return loss


def _norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _model(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    compiled: Any = torch.compile(model, backend=BACKEND)
    return lambda: _train(compiled, optimizer, inputs)


def _without_breaks(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    compiled: Any = torch.compile(model, backend=BACKEND, fullgraph=True)
    return lambda: _train(compiled, optimizer, inputs)


def _loss(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    compiled: Any = torch.compile(_Loss(model).__call__, backend=BACKEND)
    return lambda: _train(compiled, optimizer, inputs)


def _penalty(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    """Reads parameters behind a step, whose update may be on its way."""

    compiled: Any = torch.compile(_norm, backend=BACKEND)
    return lambda: _train(model, optimizer, inputs) + compiled(model).detach()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    def step() -> Tensor:
        return _train(model, optimizer, inputs)

    return torch.compile(step, backend=BACKEND)


def _layers(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    return lambda: _train(model, optimizer, inputs)


def _method(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> Any:
    model.compile(backend=BACKEND)
    model.compile()
    return lambda: _train(model, optimizer, inputs)


def _plainly(name: str, model: nn.Module, optimizer: Any, inputs: Inputs) -> Any:
    if name == "loss":
        return lambda: _train(_Loss(model), optimizer, inputs)
    if name == "penalty":
        return lambda: _train(model, optimizer, inputs) + _norm(model).detach()
    return lambda: _train(model, optimizer, inputs)


AROUND: dict[str, tuple[Around, str]] = {
    "model": (_model, "called from code that torch.compile captures"),
    "model, fullgraph": (_without_breaks, "called from code that torch.compile captures"),
    "loss": (_loss, "called from code that torch.compile captures"),
    "train step": (_step, "called from code that torch.compile captures"),
    "method": (_method, r"Stack.compile\(\) does nothing"),
    "penalty": (_penalty, ""),
    "layers": (_layers, ""),
}


@pytest.mark.parametrize("name", AROUND)
def test_torch_compile_changes_nothing(name: str) -> None:
    plain, streamed, inputs = stacks()
    around, said = AROUND[name]
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, streamed))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wanted, got = _plainly(name, plain, mine, inputs), around(streamed, theirs, inputs)
        for _ in range(3):
            assert equal(wanted(), got())
            assert_same(plain, streamed)
    ours = [str(w.message) for w in caught if str(w.message).startswith("megacompile")]
    assert len(ours) == (1 if said else 0), ours
    if said:
        assert [w for w in caught if said.replace("\\", "") in str(w.message)]
    assert schedules(streamed), "and it is still streamed"


def test_a_graph_that_must_not_break_names_the_fix() -> None:
    _, streamed, inputs = stacks()

    def loss() -> Any:
        return streamed(**inputs) * 2

    compiled: Any = torch.compile(loss, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        compiled()


@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_compiled_model_is_asked_for_its_schedules() -> None:
    _, streamed, inputs = stacks()
    compiled: Any = torch.compile(streamed, backend="eager")
    compiled(**inputs)
    assert schedules(compiled) == schedules(streamed) != []


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_can_be_compiled(again: Callable[[Any], Any]) -> None:
    plain, streamed, inputs = stacks()
    other = again(streamed)
    other.compile(backend="eager")
    assert equal(plain(**inputs).detach(), other(**inputs).detach())
    assert inside.is_streamed(other)
