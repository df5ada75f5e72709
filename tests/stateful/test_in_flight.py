"""`optimizer.step()` returns before its updates are made; whoever looks waits for them.

The updates are late: they are made when somebody waits. That each read and each other name of
memory waits, and sees what the plain model has, is drawn in `test_training.py`; here is who waits
for what, and what fails.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megacompile.errors import OptimizerError
from tests import inside
from tests.stateful.late import Late, late
from tests.training import (
    BUCKET,
    NAME,
    adamw,
    assert_states_same,
    data,
    gradients,
    net,
    train,
)
from tests.zoo import WIDTH, assert_same, equal, twins

LIBRARY: Any = torch  # its stubs do not know all of these
EXCHANGE = "__dlpack_c_exchange_api__"  # libraries that find it read memory without a call


class Flying:
    """A plain model and a streamed one, whose updates are late."""

    def __init__(self) -> None:
        self.plain, self.model = twins(net())
        (self.mine,), (self.theirs,) = adamw(self.plain), adamw(self.model)
        self.both: list[tuple[Any, Optimizer]] = [
            (self.plain, self.mine),
            (self.model, self.theirs),
        ]
        for model, optimizer in self.both:
            train(model, [optimizer], 2)
        self.saved = copy.deepcopy((self.plain.state_dict(), self.mine.state_dict()))
        self.workers: Late = late(self.model)
        self.steps = 2

    def step(self, before: Callable[[Any], Any] = lambda model: None) -> list[Any]:
        """Another one, whose update is in flight; gives what `before` gives, of each model."""
        found = []
        for model, optimizer in self.both:
            optimizer.zero_grad()
            gradients(model, self.steps)
            self.workers.finish()
            self.workers.waited.clear()
            self.workers.ran.clear()
            found.append(before(model))
            optimizer.step()
        self.steps += 1
        return found

    def load(self) -> None:
        for model, optimizer in self.both:
            model.load_state_dict(self.saved[0])
            optimizer.load_state_dict(copy.deepcopy(self.saved[1]))


def test_who_waits_for_what() -> None:
    both = Flying()
    workers, model = both.workers, both.model
    both.step()
    param = model.get_parameter(NAME)
    assert not workers.waited and not workers.ran, "step() does not wait"
    assert (param.shape, param.dtype, param.device.type) == ((32, WIDTH), torch.float32, "cpu")
    assert param.requires_grad and param.is_leaf and param.grad is not None
    assert isinstance(param, nn.Parameter) and param in both.theirs.state
    assert not hasattr(type(param), EXCHANGE)
    assert workers.waited == [], "nobody who asks for what is known without the values"
    param.sum()
    assert workers.waited == workers.ran[-1:] == [BUCKET] and "head+spare" not in workers.ran
    assert type(param) is nn.Parameter and type(param.grad) is torch.Tensor
    assert hasattr(type(param), EXCHANGE) == hasattr(Tensor, EXCHANGE)
    assert type(both.theirs.state[param]["exp_avg"]) is torch.Tensor
    assert_same(both.plain, model)
    # the next forward waits bucket after bucket, in the order in which it reads them
    both.step()
    order = workers.names
    assert order.index("embed") < order.index("layers.0") < order.index("layers.2")
    both.theirs.zero_grad()
    both.mine.zero_grad()
    assert workers.waited == [] and order[-1] == "head+spare"
    with torch.no_grad():
        assert equal(both.plain(**data(7)), model(**data(7)))
    assert workers.waited == [name for name in order if name in workers.waited]
    assert workers.waited[-1] == "head+spare"
    # an option is for the next step
    both.step()
    before = [group["lr"] for group in both.theirs.param_groups]
    for group in both.theirs.param_groups:
        group["lr"] = 1000.0
    assert workers.waited == []
    assert_same(both.plain, model)
    for group, lr in zip(both.theirs.param_groups, before, strict=True):
        group["lr"] = lr
    # gradients that the step reads are zeroed and overwritten behind it
    both.step()
    for each, optimizer in both.both:
        optimizer.zero_grad(set_to_none=False)
        gradients(each, 9)
    assert BUCKET in workers.waited
    assert_same(both.plain, model)


EXPORTS: dict[str, Callable[[Any], Tensor]] = {
    "to_dlpack": lambda p: LIBRARY.from_dlpack(LIBRARY.utils.dlpack.to_dlpack(p)),
    "_to_dlpack_versioned": lambda p: LIBRARY.from_dlpack(LIBRARY._C._to_dlpack_versioned(p)),
    "from_dlpack": lambda p: LIBRARY.from_dlpack(p.detach()),
    "__dlpack__": lambda p: LIBRARY.from_dlpack(p.detach().__dlpack__()),
    "np.from_dlpack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())),
    "np.asarray": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "data_ptr": lambda p: (p.data_ptr(), p)[1],
    "untyped_storage": lambda p: torch.empty(0).set_(p.untyped_storage()).view(p.shape),
}


def own(model: Any) -> Tensor:
    """What the user has put into `p.grad` is guarded itself."""
    param = model.get_parameter(NAME)
    param.grad = torch.full_like(param, 0.5)
    return param.grad


def test_other_names_of_memory() -> None:
    """They are written behind the step, whose update reads what was there."""
    both = Flying()
    aliases = both.step(lambda model: list(model.state_dict().values()))
    assert BUCKET in both.workers.waited and not both.workers.names
    del aliases
    states = [opt.state[m.get_parameter(NAME)]["exp_avg"].view(-1) for m, opt in both.both]
    both.step()
    assert both.workers.waited == [BUCKET]
    del states
    both.step()
    assert both.workers.waited == [], "nobody else has one"
    gradients_of_the_user = both.step(own)
    assert both.workers.waited == []
    for each in gradients_of_the_user:
        each.zero_()
    assert both.workers.waited == [BUCKET]
    assert_same(both.plain, both.model)
    for name, export in EXPORTS.items():
        both.step()
        plain, param = (model.get_parameter(NAME) for model, _ in both.both)
        assert both.workers.waited == []
        found = export(param)
        assert both.workers.waited == [BUCKET], name
        assert equal(found.detach(), plain.detach()), name
        del found


def test_a_failed_update_is_said_until_a_checkpoint_is_loaded() -> None:
    both = Flying()
    uses: dict[str, Callable[[], Any]] = {
        "p": lambda: both.model.get_parameter(NAME).sum(),
        "call": lambda: both.model(**data(0)),
        "step": both.theirs.step,
        "load": lambda: both.model.load_state_dict(both.saved[0]),
    }
    for name, use in uses.items():
        train(both.model, [both.theirs], 1, start=7)  # states that were loaded are adopted
        gc.collect()  # frames of errors have names for what the step guards
        both.theirs.zero_grad()
        gradients(both.model, 2)
        both.workers.fails = BUCKET
        both.theirs.step()
        if name == "load":  # it makes parameters whole, and waits for the update
            use()
        else:
            with pytest.raises(OptimizerError, match=f"'{BUCKET}'") as caught:
                use()
            assert isinstance(caught.value.__cause__, ArithmeticError)
            del caught
            with pytest.raises(OptimizerError, match="half updated"):
                use()
        both.workers.fails = ""
        both.model.load_state_dict(both.saved[0])
        with pytest.raises(OptimizerError, match="half updated"):  # half of a checkpoint
            both.theirs.step()
        both.load()
        for model, optimizer in both.both:
            train(model, [optimizer], 2, start=2)
        assert_same(both.plain, both.model)
        assert_states_same(both.mine.state_dict(), both.theirs.state_dict())
        both.load()


def test_a_step_that_breaks_off_behind_its_count() -> None:
    """Where it fails, all buckets are torn. Ctrl-C tears them where it leaves some updated only."""
    both = Flying()
    model, workers = both.model, both.workers
    for error, begun in itertools.product((RuntimeError, KeyboardInterrupt), (0, 2)):
        train(model, [both.theirs], 1, start=7)  # states that were loaded are adopted
        torn_from = copy.deepcopy(model.state_dict())
        both.theirs.zero_grad()
        gradients(model, 2)
        workers.breaks_at, workers.breaks_with = begun, error("breaks off")
        with pytest.raises(error, match="breaks off"):
            both.theirs.step()
        workers.breaks_at = -1
        workers.finish()
        torn = error is RuntimeError or begun > 0
        pendings = [bucket.pending for bucket in inside.buckets(model).values()]
        assert {pending.is_torn() for pending in pendings} == {torn}
        if not torn:  # nothing of it was made
            assert all(equal(v, torn_from[n]) for n, v in model.state_dict().items())
        else:
            for use in (model.state_dict, both.theirs.state_dict, lambda: model(**data(2))):
                with pytest.raises(OptimizerError, match="half updated"):
                    use()
        both.load()
        for each, optimizer in both.both:
            train(each, [optimizer], 2, start=2)
        assert_same(both.plain, model)
        both.load()
