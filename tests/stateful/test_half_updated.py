"""The update in the backward: whose update it is, and what becomes of a backward that fails.

What is refused before anything is updated is drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import SGD, AdamW, Optimizer

from megacompile import accumulate, megacompile, restoring
from megacompile.errors import ModelError, OptimizerError
from tests import zoo
from tests.stateful.late import failing, may_fail
from tests.training import take_steps
from tests.zoo import WIDTH, assert_close


def net(between: Any = None) -> Any:
    torch.manual_seed(0)
    return zoo.Stack(between=between)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def backward(model: Any, seed: int) -> None:
    zoo.step(model, zoo.batch(seed))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]  # behind what is in flight


class Wrapper(Optimizer):
    """Steps another one inside of its own step, as wrappers do that average or look ahead."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Pair:
    def __init__(self, between: Any = None) -> None:
        self.plain = net(between)
        self.model: Any = copy.deepcopy(self.plain)
        self.of_plain, self.optimizer = adamw(self.plain), adamw(self.model)
        megacompile(self.model, device="cpu", lowering="eager", optimizer=self.optimizer)
        self.both = [(self.plain, self.of_plain), (self.model, self.optimizer)]
        self.at = 0

    def steps(self, count: int) -> None:
        for each, optimizer in self.both:
            take_steps(each, optimizer, count, start=self.at)
        self.at += count

    def close(self) -> None:
        """Both are the same, but for rounding."""
        assert_close(self.plain, self.model)


def test_optimizers_that_are_no_hindrance() -> None:
    """Over what was accumulated, over other parameters, and around the one that updates."""
    pair = Pair()
    for k, (each, _) in enumerate(pair.both):
        if k:
            with accumulate(each):
                backward(each, 0)
        else:
            backward(each, 0)
        SGD(each.head.parameters(), lr=0.1).step()
        each.zero_grad()
    zoo.assert_same(pair.plain, pair.model)
    others = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for (each, optimizer), other in zip(pair.both, others, strict=True):
        second, wrapper = SGD([other], lr=0.1), Wrapper(optimizer)
        for i in range(3):
            backward(each, i)
            other.sum().backward()
            (wrapper if i else optimizer).step()
            second.step()
            optimizer.zero_grad()
            second.zero_grad()
    assert torch.equal(*others)
    pair.close()


class Adapted(nn.Module):
    """With a bypass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        torch.manual_seed(1)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.adapter(x)


def test_a_module_that_the_optimizer_does_not_know() -> None:
    """It is refused until it is frozen, or added."""
    pair = Pair(between=zoo._break)
    pair.steps(1)
    for each, _ in pair.both:
        each.layers[1] = Adapted(each.layers[1])
    before = values(pair.model)
    pair.optimizer.zero_grad()
    with pytest.raises(OptimizerError):
        backward(pair.model, 2)
    assert all(map(torch.equal, before, values(pair.model)))
    for each, _ in pair.both:
        each.layers[1].adapter.requires_grad_(False)
    pair.steps(1)
    for each, optimizer in pair.both:
        each.layers[1].adapter.requires_grad_(True)
        optimizer.add_param_group({"params": list(each.layers[1].adapter.parameters())})
    pair.steps(2)
    pair.close()
    params = pair.optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not pair.model.head.bias]
    with pytest.raises(OptimizerError):
        take_steps(pair.model, pair.optimizer, 1)


def fails(i: int, hidden: Tensor) -> Tensor:
    """Behind the second layer: the backward of what is behind it comes first."""
    return may_fail(hidden) if i == 1 else hidden


class Half(Pair):
    """Half of it can be updated, again and again; `saved` is the checkpoint before."""

    def __init__(self) -> None:
        super().__init__(between=fails)
        self.steps(2)

    def fail(self) -> None:
        """Leave it half updated."""
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.optimizer.zero_grad()
        with failing():
            backward(self.model, 2)

    def refused(self) -> None:
        """Whatever saves or goes on says that it is half updated, each time."""
        model, optimizer = self.model, self.optimizer
        uses = [lambda: backward(model, 2), optimizer.step, model.state_dict, optimizer.state_dict]
        for use in uses * 2:
            with pytest.raises(OptimizerError, match="half updated"):
                use()

    def copy(self) -> None:
        """The parameters of the checkpoint, in place."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.saved[0][name])

    def load(self, *, copying: bool = False) -> None:
        if copying:
            self.copy()
        else:
            self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def go_on(self) -> None:
        """All is as if nothing had been."""
        self.steps(2)
        self.close()


def test_a_checkpoint_goes_on() -> None:
    """Whether it is loaded when the backward failed, or when everything has said so."""
    half = Half()
    for told in (False, True):
        for copying in (False, True):
            half.fail()
            if told:
                half.refused()
            half.load(copying=copying)
            half.go_on()
    # half a checkpoint is not enough
    half.fail()
    with torch.no_grad():
        half.model.layers[2].norm.weight.copy_(half.saved[0]["layers.2.norm.weight"])
    half.optimizer.load_state_dict(copy.deepcopy(half.saved[1]))
    half.refused()
    half.load()
    half.fail()
    half.model.load_state_dict(half.saved[0])
    half.refused()
    half.load()
    # a step behind it does not count; one of nothing is none
    counts = {float(v) for s in half.optimizer.state.values() for k, v in s.items() if k == "step"}
    assert counts == {float(half.at)}
    half.optimizer.zero_grad()
    half.optimizer.step()
    half.go_on()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_loader_that_reads_first(tmp_path: Path) -> None:
    """As that of torch.distributed.checkpoint. What is not restored is refused again."""
    half = Half()
    model, optimizer = half.model, half.optimizer
    half.fail()
    whole = copy.deepcopy(half.plain)
    of_whole = adamw(whole)
    whole.load_state_dict(half.saved[0])
    of_whole.load_state_dict(copy.deepcopy(half.saved[1]))
    state = {"model": get_model_state_dict(whole), "of": get_optimizer_state_dict(whole, of_whole)}
    save(state, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerError):
        get_model_state_dict(model)
    for loaded in ("nothing", "the model", "the optimizer"):
        with pytest.raises(OptimizerError, match="half updated"), restoring(model):
            for each in (model, optimizer):
                each.state_dict()
            if loaded == "the model":
                model.load_state_dict(half.saved[0])
            if loaded == "the optimizer":
                optimizer.load_state_dict(copy.deepcopy(half.saved[1]))
        half.refused()
        half.load()
        half.fail()
    with pytest.raises(ZeroDivisionError), restoring(model):
        model.state_dict()
        raise ZeroDivisionError
    half.refused()
    with restoring(model):
        targets: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "of": get_optimizer_state_dict(model, optimizer),
        }
        uses: list[Callable[[], object]] = [lambda: backward(model, 2), optimizer.step]
        for use in uses:
            with pytest.raises(OptimizerError, match="half updated"):
                use()
        load(targets, checkpoint_id=tmp_path)
        set_model_state_dict(model, targets["model"])
        set_optimizer_state_dict(model, optimizer, targets["of"])
    half.go_on()
    with restoring(model):  # there is nothing to be restored
        half.go_on()
    with pytest.raises(ModelError), restoring(net()):
        pass
