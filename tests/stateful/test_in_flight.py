"""`optimizer.step()` returns before its updates are made; whoever looks waits for them.

The updates are late: they are made when somebody waits. That each read and each other name of
memory waits, and sees what the plain model has, is drawn in `test_training.py`; here is who waits
for what, and what fails.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from megacompile.errors import OptimizerError
from tests import inside
from tests.draws import drawn
from tests.equality.nets import Applies
from tests.interrupts import Places, profiled, traced
from tests.processes import in_threads
from tests.stateful.late import AtCall, Late, late
from tests.training import BUCKET, NAME, adamw, data, gradients, net, train
from tests.zoo import (
    WIDTH,
    assert_same,
    assert_steps_same,
    batch,
    difference,
    differences,
    equal,
    step,
    twins,
)

LIBRARY: Any = torch  # its stubs do not know all of these
MIDDLE = 5  # of the ops of a forward: it has still to read layers.2 and the head
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
        assert not difference(both.mine.state_dict(), both.theirs.state_dict())
        both.load()


def test_states_are_loaded_behind_the_update_that_fails() -> None:
    """And then the parameters: what it has torn before is whole."""
    both = Flying()
    both.workers.fails = BUCKET
    both.step()
    for model, optimizer in both.both:
        optimizer.load_state_dict(copy.deepcopy(both.saved[1]))
        model.load_state_dict(both.saved[0])
    both.workers.fails = ""
    for model, optimizer in both.both:
        train(model, [optimizer], 2, start=2)
    assert_same(both.plain, both.model)


def test_a_step_of_another_thread_waits_for_a_forward() -> None:
    """Which would read some parameters of before the step, and others of behind it."""
    both = Flying()
    for model, optimizer in both.both:
        optimizer.zero_grad()
        gradients(model, both.steps)
    waits, issued = threading.Event(), itertools.count()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "hold":
            waits.set()

    def step_there() -> None:
        with profiled(note):
            both.theirs.step()
        both.workers.finish()
        waits.set()

    def in_the_middle(stream: object) -> None:
        if next(issued) == MIDDLE:
            other.start()
            assert waits.wait(100)

    other = threading.Thread(target=step_there)
    with torch.no_grad(), inside.before_each_op(both.model, in_the_middle):
        assert equal(both.plain(**data(7)), both.model(**data(7)))
        other.join()
    both.mine.step()
    assert_same(both.plain, both.model)


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


def test_ctrl_c_in_an_update_of_residents() -> None:
    """By torch: a parameter that it has not come to would be of the step before."""
    options: dict[str, Any] = {"lowering": "eager", "state_dtype": torch.bfloat16}
    _, model = twins(net(), resident="all", **options)
    (optimizer,) = adamw(model)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for steps in (0, 2):  # the last one is like the one before it
        for place, torn in (("update_residents", False), ("apply", True)):
            train(model, [optimizer], steps)
            optimizer.zero_grad()
            gradients(model, 2)
            before = copy.deepcopy(model.state_dict())
            with (
                pytest.raises(KeyboardInterrupt),
                profiled(AtCall(place, 1 + 2 * torn, KeyboardInterrupt())),
            ):
                optimizer.step()
            if torn:
                for use in (model.state_dict, optimizer.state_dict, lambda: model(**data(2))):
                    with pytest.raises(OptimizerError):
                        use()
            else:
                assert not difference(before, model.state_dict())
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


CALL = ("streamed", "proxies", "undo", "compat", "contextlib", "guards", "swap")


def two() -> nn.Module:
    """As small as can be: every place is a case."""
    function: Any = lambda m, x, y: (m.second(m.first(x)) - y).square().mean()  # noqa: E731
    return Applies(function, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))


def state() -> tuple[Any, ...]:
    """What a call changes for its own time in this thread."""
    return (
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.allow_rnn,
        LIBRARY._C._get_torch_function_state(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def is_free(lock: Any) -> bool:
    """Can another thread acquire a lock?"""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    in_threads([look])
    return found[0]


def interrupted(call: Callable[[], object], at: int, *files: str) -> Places:
    """A call with a Ctrl-C at a place of it, if it comes to it."""
    places = Places(at, *files)
    with contextlib.suppress(KeyboardInterrupt), traced(places):
        call()
    return places


def assert_whole(model: Any, params: dict[str, nn.Parameter], before: Any, place: str) -> None:
    """Its parameters are in their places, it can be saved, and nobody holds it."""
    now = dict(model.named_parameters())
    assert not inside.has_proxies(model), place
    assert list(now) == list(params) and all(now[k] is params[k] for k in params), place
    torch.save(model.state_dict(), io.BytesIO())
    assert is_free(inside.streamed(model).buckets.alone), place
    assert state() == before, place


@pytest.mark.parametrize("stride", drawn([3], [1]))
def test_anywhere_in_a_call(stride: int) -> None:
    """Of the model, and by `functional_call` with parameters of the caller's."""
    torch.manual_seed(0)
    plain, model = twins(two())
    assert_steps_same(plain, model, batch())
    params, before = dict(model.named_parameters()), state()
    weights = {"first.weight": params["first.weight"] * 2, "second.bias": torch.ones(WIDTH)}
    given = dict(weights)
    calls: list[Callable[[], object]] = [
        lambda: model(**batch()),
        lambda: functional_call(model, weights, kwargs=batch()),
    ]
    for call in calls:
        call()
        count = interrupted(call, 0, *CALL).passed
        assert count > 200
        for at in range(1, count + 1, stride):
            places = interrupted(call, at, *CALL)
            assert places.stopped
            assert_whole(model, params, before, places.stopped)
            assert all(weights[name] is given[name] for name in given), places.stopped
            if at % (7 * stride) == 1:
                model.zero_grad()
                step(model, batch())
                assert differences(plain, model) == [], places.stopped


def test_what_two_interrupts_have_left_is_put_back() -> None:
    """The second of them where the first is made good."""
    torch.manual_seed(0)
    plain, model = twins(two())
    inside.streamed(model).buckets.proxies.swap_in([])
    assert_steps_same(plain, model, batch())
    assert not inside.has_proxies(model)


def test_in_the_keys_of_programs() -> None:
    """Where a program with symbols is noted as the last one called: later calls find it."""
    torch.manual_seed(0)
    plain, model = twins(nn.Linear(WIDTH, WIDTH))
    for rows in (3, 4, 5):
        model(torch.randn(rows, WIDTH))
    nth = hashes = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal hashes
        if event == "call" and frame.f_code.co_name == "__hash__":
            hashes += 1
            if hashes == nth:
                raise KeyboardInterrupt

    while hashes == nth:
        nth, hashes = nth + 1, 0
        with contextlib.suppress(KeyboardInterrupt), profiled(look):
            model(torch.randn(4, WIDTH))
        x = torch.randn(5, WIDTH)
        assert equal(model(x), plain(x)), nth
    assert nth > 3
