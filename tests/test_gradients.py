"""Gradients: what `p.grad` is after each backward, bucket by bucket, without a model.

`Graph` stands in for a captured graph: its backward hands gradients over as a schedule does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.accumulators import users_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_run import Run
from megacompile.runtime.params.gradients import Gradients
from megacompile.runtime.params.proxies import Link

New = Mapping[int, Mapping[int, Tensor]]  # bucket key -> parameter's index -> its new gradient


class Model:
    """Two buckets: 0 with `a` (4, 3), `b` (5,) and `c` (2,), and 1 with `d` (3,)."""

    def __init__(self) -> None:
        shapes = {"a": (4, 3), "b": (5,), "c": (2,), "d": (3,)}
        self.params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        self.gradients = Gradients(Streams(torch.device("cpu")))
        self.buckets = {0: self.bucket(0, "abc"), 1: self.bucket(1, "d")}
        self.gradients.bind(self.buckets)
        self.accumulated: list[bool] = []

    def bucket(self, key: int, names: str) -> HostBucket:
        named = [(name, self.params[name]) for name in names]
        return HostBucket(Bucket.layout(key, names, named), [p for _, p in named], pin=False)

    def __getattr__(self, name: str) -> nn.Parameter:
        return self.params[name]

    def schedule(self, new: New) -> list[Tensor | None]:
        """What a backward schedule does: add to the gradients so far, and offload. Gives what
        autograd gets."""
        wanted = {key: tuple(found) for key, found in new.items()}
        places = tuple((key, i) for key, found in new.items() for i in found)
        users = [users_of(call, (Graph,), Link) for call in compat.backward_calls()[-1:]]
        run = Run(self.gradients, places, users)
        accumulate = run.start(wanted)
        self.accumulated.append(accumulate)
        for key, found in new.items():
            for i, gradient in found.items():
                so_far = run.so_far(key, i)
                assert accumulate or so_far is None
                total = gradient if so_far is None else so_far + gradient
                run.buffer(key, i).copy_(total)
            run.copied(key, None)
        of_params, of_proxies = run.for_autograd()
        assert not of_proxies
        return [of_params.pop(place, None) for place in places]

    def backward(self, *runs: New | Callable[[], None]) -> None:
        """One backward() through a graph for each of `runs`, the first of them first."""
        with torch.enable_grad():  # inside of a backward it is off
            x = torch.ones((), requires_grad=True)
            for run in reversed(runs):
                if isinstance(run, Mapping):
                    params = [self.buckets[key].params[i] for key in run for i in run[key]]
                    x = Graph.apply(x, functools.partial(self.schedule, run), *params)  # type: ignore[no-untyped-call]
                elif isinstance(run, Uses):
                    x = Eager.apply(x, run.gradient, run.param)  # type: ignore[no-untyped-call]
                else:
                    x = Graph.apply(x, run)  # type: ignore[no-untyped-call]
            x.backward()


class Graph(torch.autograd.Function):
    """A captured graph; its backward calls what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], Any], *params: Tensor) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, *(ctx.act() or [])


class Eager(torch.autograd.Function):
    """Code that is not captured, with a gradient for one parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Tensor, param: Tensor) -> Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, ctx.found


class Uses:
    """A use of a parameter in eager code."""

    def __init__(self, param: nn.Parameter, gradient: Tensor) -> None:
        self.param, self.gradient = param, gradient

    def __call__(self) -> None:
        """As the others, for the type."""


@pytest.fixture
def model() -> Model:
    compat.note_backward_calls()
    return Model()


def full(param: Tensor, value: float) -> Tensor:
    return torch.full(param.shape, float(value))


def assert_grad(param: nn.Parameter, value: float) -> None:
    assert param.grad is not None
    assert torch.equal(param.grad, full(param, value)), param.grad


def new(model: Model, value: float, names: str = "abcd") -> dict[int, dict[int, Tensor]]:
    """The gradient `value` for the parameters of these names."""
    found: dict[int, dict[int, Tensor]] = {}
    for name in names:
        key, i = (1, 0) if name == "d" else (0, "abc".index(name))
        found.setdefault(key, {})[i] = full(model.params[name], value)
    return found


# --- writing


def test_none_is_written(model: Model) -> None:
    model.backward(new(model, 2))
    assert model.accumulated == [False]
    for param in model.params.values():
        assert_grad(param, 2)


def test_gradients_lie_in_the_bucket(model: Model) -> None:
    """They are copied there and nowhere else."""
    model.backward(new(model, 2))
    for key, bucket in model.buckets.items():
        for param, buffer in zip(bucket.params, bucket.grads.values(), strict=True):
            assert param.grad is not None and param.grad.data_ptr() == buffer.data_ptr(), key
            assert not param.grad.requires_grad and param.grad.is_leaf


def test_they_are_set_when_nothing_more_is_to_come(model: Model) -> None:
    """As autograd does: a parameter's is accumulated behind the last graph that uses it."""
    seen: list[tuple[object, object]] = []
    see = functools.partial(lambda: seen.append((model.a.grad, model.d.grad)))
    model.backward(new(model, 2), see, new(model, 3, "d"))
    ((of_a, of_d),) = seen
    assert of_a is not None and of_d is None
    assert_grad(model.a, 2)
    assert_grad(model.d, 5)


def test_who_gets_none_keeps_none(model: Model) -> None:
    model.backward(new(model, 2, "ac"))
    assert model.b.grad is None and model.d.grad is None
    assert_grad(model.a, 2)
    assert_grad(model.c, 2)
    assert model.buckets[1].grads == {}, "no memory for a bucket without gradients"


def test_no_gradients_at_all(model: Model) -> None:
    model.backward({})
    assert all(param.grad is None for param in model.params.values())


# --- accumulating


def test_what_is_there_is_accumulated_into(model: Model) -> None:
    model.backward(new(model, 2))
    before = {name: param.grad for name, param in model.params.items()}
    model.backward(new(model, 3))
    assert model.accumulated == [False, True]
    for name, param in model.params.items():
        assert_grad(param, 5)
        assert param.grad is before[name], "in place, as autograd does"


def test_zeroed_in_place(model: Model) -> None:
    model.backward(new(model, 2))
    grad = model.a.grad
    assert grad is not None
    grad.zero_()
    model.backward(new(model, 3))
    assert model.a.grad is grad
    assert_grad(model.a, 3)
    assert_grad(model.b, 5)


def test_none_and_not_none_in_one_bucket(model: Model) -> None:
    model.backward(new(model, 2))
    model.b.grad = None
    model.backward(new(model, 3))
    for name, value in {"a": 5, "b": 3, "c": 5, "d": 5}.items():
        assert_grad(model.params[name], value)


def test_who_gets_none_keeps_what_it_has(model: Model) -> None:
    model.backward(new(model, 2))
    grad = model.b.grad
    model.backward(new(model, 3, "ac"))
    assert model.b.grad is grad
    assert_grad(model.b, 2)
    assert_grad(model.a, 5)


def test_parameters_take_turns(model: Model) -> None:
    """Those of a bucket that got none in the first backward get theirs in the second."""
    model.backward(new(model, 2, "a"))
    model.backward(new(model, 3, "bd"))
    model.backward(new(model, 4, "abcd"))
    for name, value in {"a": 6, "b": 7, "c": 4, "d": 7}.items():
        assert_grad(model.params[name], value)


# --- gradients of the user


def test_a_tensor_of_the_user_is_accumulated_into(model: Model) -> None:
    given = torch.full((4, 3), 10.0)
    model.a.grad = given
    for value in (12, 14):
        model.backward(new(model, 2))
        assert model.a.grad is given
        assert torch.equal(given, torch.full((4, 3), float(value)))
    assert_grad(model.b, 4)


def test_a_transposed_tensor_of_the_user(model: Model) -> None:
    given = torch.arange(12.0).reshape(3, 4).t()
    wanted = given + 2
    model.a.grad = given
    model.backward(new(model, 2))
    assert model.a.grad is given
    assert torch.equal(given, wanted)


def test_a_tensor_that_the_user_puts_in_place_of_ours(model: Model) -> None:
    model.backward(new(model, 2))
    ours = model.a.grad
    model.a.grad = torch.ones(4, 3)
    model.backward(new(model, 3))
    assert_grad(model.a, 4)
    assert ours is not None and model.a.grad is not ours
    model.a.grad = None
    model.backward(new(model, 5))
    assert_grad(model.a, 5)


# --- gradients that somebody holds


@pytest.mark.parametrize("kind", ["tensor", "view", "detached"])
def test_a_held_gradient_is_not_overwritten(model: Model, kind: str) -> None:
    model.backward(new(model, 2))
    assert model.a.grad is not None
    grad = model.a.grad
    held = {"tensor": grad, "view": grad[1:], "detached": grad.detach()}[kind]
    del grad
    for value in (3, 4):
        for param in model.params.values():
            param.grad = None
        model.backward(new(model, value))
        assert_grad(model.a, value)
    assert torch.equal(held, torch.full(held.shape, 2.0))


def test_a_held_gradient_leaves_those_beside_it(model: Model) -> None:
    """`b` and `c` accumulate in place, although the bucket gets new memory because of `a`."""
    model.backward(new(model, 2))
    held, beside = model.a.grad, model.b.grad
    model.c.grad = torch.full((2,), 7.0)  # the user's own
    model.a.grad = None
    model.backward(new(model, 3))
    assert held is not None and torch.equal(held, full(model.a, 2))
    assert_grad(model.a, 3)
    assert_grad(model.b, 5)
    assert_grad(model.c, 10)
    assert model.b.grad is beside, "the same tensor, as in the plain loop"


def test_memory_that_nobody_holds_is_used_again(model: Model) -> None:
    model.backward(new(model, 2))
    places = [
        buffer.data_ptr() for bucket in model.buckets.values() for buffer in bucket.grads.values()
    ]
    for param in model.params.values():
        param.grad = None
    model.backward(new(model, 3))
    again = [
        buffer.data_ptr() for bucket in model.buckets.values() for buffer in bucket.grads.values()
    ]
    assert again == places


# --- several graphs, and eager code


def test_two_graphs_in_one_backward(model: Model) -> None:
    model.backward(new(model, 2), new(model, 3, "ad"))
    assert model.accumulated == [False, True]
    for name, value in {"a": 5, "b": 2, "c": 2, "d": 5}.items():
        assert_grad(model.params[name], value)


def test_two_graphs_in_one_backward_that_accumulates(model: Model) -> None:
    given = torch.full((5,), 10.0)
    model.b.grad = given
    model.backward(new(model, 1))
    grad = model.a.grad
    model.backward(new(model, 2), new(model, 3))
    assert model.a.grad is grad and model.b.grad is given
    assert_grad(model.a, 6)
    assert_grad(model.b, 16)


def test_a_gradient_held_between_two_graphs_of_one_backward(model: Model) -> None:
    """The second graph must not take the buffer of the first for one that somebody holds."""
    model.backward(new(model, 2))
    held = model.a.grad
    for param in model.params.values():
        param.grad = None
    model.backward(new(model, 3), new(model, 4))
    assert held is not None and torch.equal(held, full(model.a, 2))
    for param in model.params.values():
        assert_grad(param, 7)


@pytest.mark.parametrize("eager_first", [True, False])
def test_a_parameter_that_eager_code_uses_too(model: Model, eager_first: bool) -> None:
    runs: list[New | Callable[[], None]] = [Uses(model.a, full(model.a, 10)), new(model, 2)]
    for value in (12, 24):
        model.backward(*runs if eager_first else runs[::-1])
        assert_grad(model.a, value)
    assert_grad(model.b, 4)


def test_a_sum_of_autograd_goes_into_the_bucket(model: Model) -> None:
    model.backward(Uses(model.a, full(model.a, 10)), new(model, 2))
    assert_grad(model.a, 12)
    assert model.a.grad is not None
    assert model.a.grad.data_ptr() == model.buckets[0].grads[0].data_ptr()


def test_a_parameter_that_only_eager_code_uses(model: Model) -> None:
    eager = Uses(model.a, full(model.a, 10))
    model.backward(eager)
    first = model.a.grad
    model.backward(eager)
    assert_grad(model.a, 20)
    assert model.a.grad is first
    model.backward(new(model, 1))
    assert_grad(model.a, 21)
    assert model.a.grad is first


def test_two_backwards_at_once(model: Model) -> None:
    """One that begins while another one, of another thread, has not ended."""
    model.backward(new(model, 2), lambda: model.backward(new(model, 3)))
    for param in model.params.values():
        assert_grad(param, 5)


# --- a backward inside of a backward, as a reentrant checkpoint makes it


def test_an_inner_backward_belongs_to_the_outer_one(model: Model) -> None:

    def nested() -> None:
        model.backward(new(model, 3))
        assert model.a.grad is not None, "as in the plain loop"

    for value in (1, 2):
        model.backward(new(model, 2, "ab"), nested, new(model, 4, "bd"))
        for name, each in {"a": 5, "b": 9, "c": 3, "d": 7}.items():
            assert_grad(model.params[name], value * each)


def test_an_inner_backward_that_comes_first(model: Model) -> None:
    model.backward(lambda: model.backward(new(model, 3)), new(model, 4, "b"))
    for name, value in {"a": 3, "b": 7, "c": 3, "d": 3}.items():
        assert_grad(model.params[name], value)


def test_eager_code_in_an_inner_backward(model: Model) -> None:
    eager = Uses(model.a, full(model.a, 10))
    model.backward(new(model, 2), lambda: model.backward(eager))
    assert_grad(model.a, 12)
    assert_grad(model.b, 2)


def test_an_inner_backward_that_fails(model: Model) -> None:
    def fail() -> None:
        raise RuntimeError("in the inner backward")

    with pytest.raises(RuntimeError, match="in the inner backward"):
        model.backward(new(model, 2), lambda: model.backward(new(model, 3), fail))
    for param in model.params.values():
        assert_grad(param, 5)  # as in the plain loop
        param.grad = None
    model.backward(new(model, 4, "a"))
    assert_grad(model.a, 4)
    assert model.b.grad is None


# --- backwards that fail


def test_a_failed_backward_leaves_what_was_accumulated(model: Model) -> None:
    def fail() -> None:
        raise RuntimeError("in the backward")

    with pytest.raises(RuntimeError, match="in the backward"):
        model.backward(new(model, 2), fail, new(model, 3, "d"))
    assert model.d.grad is None
    for name in "abc":
        assert_grad(model.params[name], 2)  # as in the plain loop
        model.params[name].grad = None
    model.backward(new(model, 3, "ab"))
    assert model.accumulated == [False, False]
    assert_grad(model.a, 3)
    assert model.c.grad is None and model.d.grad is None, "nor in what the next does not write"


def test_a_failed_backward_leaves_the_tensors_of_the_user(model: Model) -> None:
    def fail() -> None:
        raise RuntimeError("in the backward")

    given = torch.full((4, 3), 10.0)
    model.a.grad = given
    with pytest.raises(RuntimeError, match="in the backward"):
        model.backward(new(model, 2, "b"), fail, new(model, 2, "a"))
    assert model.a.grad is given and torch.equal(given, torch.full((4, 3), 10.0))
    model.backward(new(model, 3))
    assert model.a.grad is given and torch.equal(given, torch.full((4, 3), 13.0))


def test_a_failed_backward_gives_back_what_it_took_over(model: Model) -> None:
    """The second graph fails, so that autograd never accumulates the total of the first."""
    model.backward(new(model, 2))
    before = {name: param.grad for name, param in model.params.items()}

    class Failing(dict[int, dict[int, Tensor]]):
        """The gradients of a graph whose backward fails."""

    def schedule(new: New) -> list[Tensor | None]:
        if isinstance(new, Failing):
            raise RuntimeError("in the backward")
        return type(model).schedule(model, new)

    model.schedule = schedule  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="in the backward"):
        model.backward(new(model, 3), Failing(new(model, 4)))
    for name, param in model.params.items():
        assert param.grad is before[name]


# --- hooks


def test_hooks_run_once_with_the_whole_gradient(model: Model) -> None:
    seen: list[float] = []
    model.a.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad[0, 0])))
    model.backward(new(model, 2), new(model, 3))
    assert seen == [5]
    model.backward(new(model, 4, "d"))
    assert seen == [5], "not for who got nothing"


@pytest.mark.parametrize("eager_first", [True, False])
def test_hooks_run_once_where_eager_code_uses_it_too(model: Model, eager_first: bool) -> None:
    seen: list[float] = []
    model.a.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad[0, 0])))

    runs: list[New | Callable[[], None]] = [Uses(model.a, full(model.a, 10)), new(model, 2)]
    model.backward(*runs if eager_first else runs[::-1])
    assert seen == [12]


def test_a_hook_may_step_and_free(model: Model) -> None:
    def update(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad)  # type: ignore[arg-type]
        param.grad = None

    for param in model.params.values():
        param.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        model.backward(new(model, 2))
    assert model.accumulated == [False, False]
    for param in model.params.values():
        assert param.grad is None
        assert torch.equal(param.detach(), full(param, -4))


def test_hooks_on_a_parameter_that_eager_code_uses_too(model: Model) -> None:
    model.c.register_hook(lambda gradient: gradient * 2)
    model.backward(Uses(model.c, full(model.c, 2)), new(model, 3))
    assert_grad(model.c, 10)


# --- buckets laid out anew


def test_gradients_move_to_new_buckets(model: Model) -> None:
    """What `p.grad` is when parameters are taken over again counts as the user's own."""
    model.backward(new(model, 2))
    kept = model.a.grad
    model.b.grad = None
    model.buckets = {0: model.bucket(0, "abc"), 1: model.bucket(1, "d")}
    model.gradients.bind(model.buckets)
    model.backward(new(model, 3))
    assert model.a.grad is kept
    for name, value in {"a": 5, "b": 3, "c": 5, "d": 5}.items():
        assert_grad(model.params[name], value)
