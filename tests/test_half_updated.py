"""The update in the backward: whose update it is, and what becomes of a backward that fails."""

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

from megacompile import megacompile, restoring
from megacompile.api import accumulate
from megacompile.errors import ModelError, OptimizerError
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.step.step import Updates
from megacompile.runtime.updates.host import HostUpdates
from tests import inside, zoo
from tests.training import take_steps
from tests.zoo import WIDTH, assert_close


def net(between: Any = None) -> Any:
    torch.manual_seed(0)
    return zoo.Stack(between=between)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def updated(
    model: Any, make: Callable[[nn.Module], Optimizer] = adamw, **options: Any
) -> tuple[Any, Optimizer]:
    optimizer = make(model)
    options = {"device": "cpu", "lowering": "eager", "optimizer": optimizer, **options}
    return megacompile(model, **options), optimizer


def backward(model: Any, seed: int) -> None:
    zoo.step(model, zoo.batch(seed))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]  # behind what is in flight


# --- a second optimizer


class Mine(SGD):
    """One that has no update of ours."""


ORDERS = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])


@ORDERS
def test_a_second_optimizer_over_a_part_is_refused(first: bool) -> None:
    model, optimizer = updated(net())
    second = SGD(model.head.parameters(), lr=0.1)
    backward(model, 0)
    if not first:
        optimizer.step()
    before = values(model)
    with pytest.raises(OptimizerError, match=r"SGD.step\(\): parameter 'head\.\w+' .*the AdamW"):
        second.step()
    assert all(map(torch.equal, before, values(model)))
    if first:
        optimizer.step()
    take_steps(model, optimizer, 2, start=1)


@ORDERS
def test_a_second_optimizer_of_another_kind_is_refused(first: bool) -> None:
    model, optimizer = updated(net())
    second = Mine(model.head.parameters(), lr=0.1)
    backward(model, 0)
    if not first:
        optimizer.step()
    with pytest.raises(OptimizerError, match="head.* (is not there|was updated in the backward)"):
        second.step()


def test_a_second_optimizer_over_what_was_accumulated() -> None:
    """Those gradients are there."""
    plain = net()
    model, _ = updated(copy.deepcopy(plain))
    backward(plain, 0)
    with accumulate(model):
        backward(model, 0)
    for each in (plain, model):
        SGD(each.head.parameters(), lr=0.1).step()
    zoo.assert_same(plain, model)


def test_a_second_optimizer_over_others() -> None:
    plain, others = net(), [nn.Parameter(torch.ones(3)) for _ in range(2)]
    model = copy.deepcopy(plain)
    model, optimizer = updated(model)
    of_plain = adamw(plain)
    for each, mine, other in ((plain, of_plain, others[0]), (model, optimizer, others[1])):
        second = SGD([other], lr=0.1)
        for i in range(3):
            backward(each, i)
            other.sum().backward()
            mine.step()
            second.step()
            mine.zero_grad()
            second.zero_grad()
    assert torch.equal(*others)
    assert_close(plain, model)


class Wrapper(Optimizer):
    """Steps another one inside of its own step, as wrappers do that average or look ahead."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_wrapper_is_no_second_optimizer() -> None:
    plain = net()
    model, optimizer = updated(copy.deepcopy(plain))
    take_steps(plain, Wrapper(adamw(plain)), 3)
    take_steps(model, Wrapper(optimizer), 3)
    assert_close(plain, model)


# --- parameters that the optimizer does not know


class Adapted(nn.Module):
    """With a bypass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        torch.manual_seed(1)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.adapter(x)
        return result


def adapt(model: Any) -> None:
    model.layers[1] = Adapted(model.layers[1])


@pytest.mark.parametrize("graph_break", [False, True])
def test_a_module_that_the_optimizer_does_not_know(graph_break: bool) -> None:
    between = zoo._break if graph_break else None
    plain = net(between)
    of_plain = adamw(plain)
    model, optimizer = updated(copy.deepcopy(plain))
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2)
        adapt(each)
    before = values(model)
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match=r"'layers.1.adapter.\w+' is not in .*add_param_group"):
        backward(model, 2)
    assert all(map(torch.equal, before, values(model)))
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        of_it.add_param_group({"params": list(each.layers[1].adapter.parameters())})
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)


def test_a_frozen_module_that_the_optimizer_does_not_know() -> None:
    plain = net()
    model, optimizer = updated(copy.deepcopy(plain))
    of_plain = adamw(plain)
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 1)
        adapt(each)
        each.layers[1].adapter.requires_grad_(False)
        take_steps(each, of_it, 2, start=1)
    assert_close(plain, model)


def test_a_parameter_that_was_taken_out_of_the_optimizer() -> None:
    model, optimizer = updated(net())
    take_steps(model, optimizer, 1)
    params = optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not model.head.bias]
    with pytest.raises(OptimizerError, match="'head.bias' is not in the AdamW"):
        take_steps(model, optimizer, 1)


# --- a backward that fails


class Fails(torch.autograd.Function):
    """In the backward, when it is told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Fails.armed:
            raise KeyError("out of luck")
        return gradients[0]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fails(i: int, hidden: Tensor) -> Tensor:
    """Behind the second layer: the backward of what is behind it comes first."""
    result: Tensor = Fails.apply(hidden) if i == 1 else hidden  # type: ignore[no-untyped-call]
    return result


@pytest.fixture
def half_updated() -> Any:
    """Makes (plain, its optimizer), (streamed, its optimizer, a checkpoint), half of it updated."""

    def make(of: Callable[[nn.Module], Optimizer] = adamw, **options: Any) -> Any:
        plain = net(fails)
        model, optimizer = updated(copy.deepcopy(plain), of, **options)
        of_plain = of(plain)
        for each, of_it in ((plain, of_plain), (model, optimizer)):
            take_steps(each, of_it, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        before = values(model)
        Fails.armed = True
        optimizer.zero_grad()
        with pytest.raises(KeyError, match="out of luck"):
            backward(model, 2)
        Fails.armed = False
        with unguarded():  # what is half updated
            same = [torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
        assert any(same) and not all(same), "half of it is updated"
        return (plain, of_plain), (model, optimizer, saved)

    Fails.armed = False
    yield make
    Fails.armed = False


def refused(model: Any, optimizer: Optimizer) -> None:
    """Whatever saves or goes on says that it is half updated, each time."""
    uses = [lambda: backward(model, 2), optimizer.step, model.state_dict, optimizer.state_dict]
    for use in uses * 2:
        with pytest.raises(OptimizerError, match="half updated.*load_state_dict.*backward failed"):
            use()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9)


def by_loading(model: Any, saved: Any) -> None:
    model.load_state_dict(saved)


def by_copying(model: Any, saved: Any) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(saved[name])


@pytest.mark.parametrize("of", [adamw, sgd])
@pytest.mark.parametrize("restore", [by_loading, by_copying])
@pytest.mark.parametrize("told", [False, True])
def test_a_checkpoint_goes_on(half_updated: Any, told: bool, restore: Any, of: Any) -> None:
    """Whether it is loaded when the backward failed, or when everything has said so."""
    (plain, of_plain), (model, optimizer, saved) = half_updated(of)
    if told:
        refused(model, optimizer)
    restore(model, saved[0])
    optimizer.load_state_dict(saved[1])
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)


@pytest.mark.parametrize("missing", ["the model", "the optimizer"])
def test_half_a_checkpoint_is_not_enough(half_updated: Any, missing: str) -> None:
    _, (model, optimizer, saved) = half_updated()
    if missing == "the model":
        optimizer.load_state_dict(saved[1])
    else:
        model.load_state_dict(saved[0])
    refused(model, optimizer)


def test_step_behind_a_backward_that_failed(half_updated: Any) -> None:
    """It would count a step that was half made."""
    (plain, of_plain), (model, optimizer, saved) = half_updated()
    refused(model, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    optimizer.step()  # of nothing
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)


def test_a_backward_that_failed_before_it_updated() -> None:
    """Nothing needs to be loaded."""
    plain = net()
    of_plain = adamw(plain)
    model, optimizer = updated(copy.deepcopy(plain))
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 1)
        loss = zoo.loss_of(each(**zoo.batch(1)))
        loss.register_hook(refuse)
        of_it.zero_grad()
        with pytest.raises(KeyError, match="no luck"):
            loss.backward()
        take_steps(each, of_it, 2, start=1)
    assert_close(plain, model)


def refuse(gradient: Tensor) -> Tensor:
    raise KeyError("no luck")


def test_a_checkpoint_is_loaded_instead_of_the_step() -> None:
    """As behind Ctrl-C between the backward and `step()`."""
    plain = net()
    model, optimizer = updated(copy.deepcopy(plain))
    reference = adamw(plain)
    take_steps(plain, reference, 2)
    take_steps(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model, 7)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    take_steps(plain, reference, 2, start=2)
    take_steps(model, optimizer, 2, start=2)
    assert_close(plain, model)


# --- loaders that do not call load_state_dict() first


def test_everything_is_overwritten(half_updated: Any) -> None:
    """In place: parameters, states and their counters. Whatever is left out is missed."""
    (plain, of_plain), (model, optimizer, saved) = half_updated()
    by_copying(model, saved[0])
    refused(model, optimizer)
    states = [optimizer.state[p] for p in model.parameters()]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        with pytest.raises(OptimizerError, match="half updated"):
            model.state_dict()
        for i, state in enumerate(states):
            state[name].copy_(saved[1]["state"][i][name])
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("of", [adamw, momentum])
def test_distributed_checkpoint(half_updated: Any, of: Any, tmp_path: Path) -> None:
    """Its loader reads first what it loads into."""
    (plain, of_plain), (model, optimizer, saved) = half_updated(of)
    whole = copy.deepcopy(plain)
    of_whole = of(whole)
    whole.load_state_dict(saved[0])
    of_whole.load_state_dict(saved[1])
    state = {"model": get_model_state_dict(whole), "of": get_optimizer_state_dict(whole, of_whole)}
    save(state, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerError, match=r"megacompile.restoring\(model\)"):
        get_model_state_dict(model)
    with restoring(model):
        targets: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "of": get_optimizer_state_dict(model, optimizer),
        }
        with pytest.raises(OptimizerError, match="half updated"):
            backward(model, 2)
        with pytest.raises(OptimizerError, match="half updated"):
            optimizer.step()
        load(targets, checkpoint_id=tmp_path)
        set_model_state_dict(model, targets["model"])
        set_optimizer_state_dict(model, optimizer, targets["of"])
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)


@pytest.mark.parametrize("loaded", ["nothing", "the model", "the optimizer"])
def test_what_is_read_and_not_restored_is_refused_again(half_updated: Any, loaded: str) -> None:
    _, (model, optimizer, saved) = half_updated()
    with pytest.raises(OptimizerError, match="half updated"), restoring(model):
        for each in (model, optimizer):
            each.state_dict()
        if loaded == "the model":
            model.load_state_dict(saved[0])
        if loaded == "the optimizer":
            optimizer.load_state_dict(saved[1])
    refused(model, optimizer)
    with pytest.raises(ZeroDivisionError), restoring(model):
        model.state_dict()
        raise ZeroDivisionError
    refused(model, optimizer)


def test_nothing_is_to_be_restored() -> None:
    model, optimizer = updated(net())
    with restoring(model):
        take_steps(model, optimizer, 1)
    with pytest.raises(ModelError, match="restoring.*not megacompiled"), restoring(net()):
        pass


# --- an exact step that breaks off


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("begun", ["none", "some", "all"])
def test_a_step_that_breaks_off_behind_its_count(
    error: type[BaseException], begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it fails, all buckets are torn. Ctrl-C tears them where it leaves some updated only."""
    plain = net()
    of_plain = AdamW(plain.parameters(), lr=1e-2)
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    backward(model, 2)
    real, count = HostUpdates.start, len(inside.buckets(model))
    calls = iter(range(count + 1))
    breaks_at = {"none": 0, "some": 1, "all": count}[begun]

    def start(updates: HostUpdates, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == breaks_at:
            raise error("breaks off")
        return real(updates, *args, **kwargs)

    def finish(*_: Any) -> None:
        raise error("breaks off")

    monkeypatch.setattr(HostUpdates, "start", start)
    if begun == "all":
        monkeypatch.setattr(Updates, "_finish", finish)
    with pytest.raises(error, match="breaks off"):
        optimizer.step()
    monkeypatch.undo()
    torn = error is RuntimeError or begun == "some"
    pendings = [bucket.pending for bucket in inside.buckets(model).values()]
    assert [pending.is_torn() for pending in pendings] == [torn] * count
    if not torn:  # all of the step was made, or nothing of it
        changed = [not torch.equal(p, saved[0][n]) for n, p in model.named_parameters()]
        assert set(changed) == {begun == "all"}
        return
    for use in (model.state_dict, optimizer.state_dict, lambda: backward(model, 2)):
        with pytest.raises(OptimizerError, match="half updated.*step.. failed with.*breaks off"):
            use()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for each, of_it in ((plain, of_plain), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    assert_close(plain, model)
