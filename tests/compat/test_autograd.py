"""What compat takes for granted of autograd's graph and engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile import compat


def leaf(size: int = 3) -> Tensor:
    return torch.ones(size, requires_grad=True)


def inside(look: Callable[[], Any], *, retain_graph: bool = False) -> Any:
    """What `look` says within a backward."""
    seen = []
    w = leaf()
    loss = (w * 2).sum()
    w.register_hook(lambda gradient: seen.append(look()))
    loss.backward(retain_graph=retain_graph)
    (found,) = seen
    return found


def test_saved_tensors_hooks_are_off_and_come_back() -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    with hooks("outer"):
        with hooks("inner"):
            with compat.without_saved_tensors_hooks():
                leaf().exp()
            assert packed == []
            leaf().exp()
        leaf().exp()
    leaf().exp()
    assert packed == ["inner", "outer"]


def test_what_a_backward_is() -> None:
    """Its number, and whether it keeps the graph."""
    assert inside(compat.keeps_graph, retain_graph=True) is True
    assert inside(compat.keeps_graph) is False
    assert compat.backward_id() == -1
    first, second = inside(compat.backward_id), inside(compat.backward_id)
    assert -1 not in (first, second) and first != second


def test_hooks_of_a_node_follow_what_is_registered() -> None:
    node = leaf().exp().grad_fn
    assert node is not None
    before, behind = compat.hooks_of(node)
    assert (len(before), len(behind)) == (0, 0)
    handle = node.register_prehook(lambda gradients: None)
    node.register_hook(lambda gradients, outputs: None)
    node.register_hook(lambda gradients, outputs: None)
    assert (len(before), len(behind)) == (1, 2)
    handle.remove()
    assert len(before) == 0


def test_what_a_backward_accumulates_into() -> None:
    """Into each, and into all of the first ones."""
    a, b, c = leaf(), leaf(), leaf()
    nodes = [compat.accumulator_of(each) for each in (a, b, c)]
    seen: list[list[bool | None]] = []

    def look(gradient: Tensor) -> None:
        seen.append([compat.accumulates_into_all(nodes[:n]) for n in (0, 1, 2, 3)])
        seen.append([*map(compat.accumulates_into, nodes[:2])])

    def loss() -> Tensor:
        product = a * b
        product.register_hook(look)
        return product.sum()

    loss().backward()
    loss().backward(inputs=[a])
    torch.autograd.grad(loss(), [b])
    assert seen[::2] == [[True] * 3 + [False], [True, True] + [False] * 2, [True] + [False] * 3]
    assert seen[1::2] == [[True, True], [True, False], [False, None]]


def test_backward_calls_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.autograd, torch.autograd.graph):
        stock = inspect.unwrap(module._engine_run_backward)
        monkeypatch.setattr(module, "_engine_run_backward", stock)
    a, seen, stand_in = leaf(), list[compat.BackwardCall](), leaf()
    compat.note_backward_calls(
        lambda given: a if given is stand_in else given, lambda given, gradient: -gradient
    )
    a.register_hook(lambda gradient: seen.extend(compat.backward_calls()))
    for call in (
        lambda loss: loss.backward(),
        lambda loss: loss.backward(inputs=[a]),
        lambda loss: torch.autograd.backward([loss], inputs=[a]),
        lambda loss: torch.autograd.grad(loss, [a]),
    ):
        loss, at = a.exp().sum(), len(seen)
        noted: list[Any] = []
        loss.register_hook(lambda g, n=noted: n.extend(c.roots for c in compat.backward_calls()))
        call(loss)
        (roots,) = noted
        assert roots[0] is loss and len(seen) == at + 1
        assert isinstance(seen[-1], compat.BackwardCall) and seen[-1].roots == ()
    assert compat.backward_calls() == ()
    for inputs in ({"inputs": [a, stand_in]}, {"inputs": (a, stand_in)}):
        gradients = torch.autograd.grad(a.exp().sum(), **inputs)
        assert torch.equal(gradients[0], a.exp()) and torch.equal(gradients[1], -a.exp())
    unused: Any = torch.autograd.grad(a.sum(), [leaf()], allow_unused=True)
    assert unused == (None,)
    a.grad = None
    a.exp().sum().backward(inputs=[stand_in])
    assert [each.grad is None for each in (stand_in, a)] == [True, False]


def test_the_node_of_a_root() -> None:
    w = leaf()
    value = w.exp()
    edge = torch.autograd.graph.get_gradient_edge(value)
    assert compat.root_node(value) is compat.root_node(edge) is value.grad_fn
    assert compat.root_node(w) is compat.accumulator_of(w)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_the_class_of_a_node() -> None:
    """`apply` unwraps what a transform has left."""
    x = leaf()
    result = compat.apply(Twice, x)
    node: Any = result.grad_fn
    assert type(node) is compat.node_class(Twice)
    assert type(x.exp().grad_fn) is not compat.node_class(Twice)
    ends = [end for end, _ in node.next_functions]
    assert ends == [compat.accumulator_of(x)] and type(ends[0]) is compat.ACCUMULATOR
    left: list[Tensor] = []

    def leaves_it(x: Tensor) -> Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(leaves_it)(torch.ones(3))
    assert compat.apply(Twice, left[0]).tolist() == [2.0] * 3


@pytest.mark.parametrize("hurried", [False, True])
def test_a_node_runs_soon(hurried: bool) -> None:
    order: list[str] = []
    early, late = leaf().exp(), leaf().exp()  # the engine runs the later node first
    for name, value in (("early", early), ("late", late)):
        assert value.grad_fn is not None
        value.grad_fn.register_hook(lambda *_, name=name: order.append(name))
    if hurried:
        assert early.grad_fn is not None
        compat.run_soon(early.grad_fn)
    (early + late).sum().backward()
    assert order == (["early", "late"] if hurried else ["late", "early"])


def test_compiled_autograd_is_seen() -> None:
    assert inside(compat.in_compiled_autograd) is False
    seen: list[bool] = []

    class Asks(Twice):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(compat.in_compiled_autograd())
            return gradient

    loss = compat.apply(Asks, leaf()).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert True in seen


def test_callbacks_run_as_a_backward_ends() -> None:
    order: list[str] = []
    w = leaf()
    w.register_hook(lambda gradient: compat.when_backward_ends(lambda: order.append("end")))
    w.register_post_accumulate_grad_hook(lambda param: order.append("gradient"))
    w.exp().sum().backward()
    assert order == ["gradient", "end"]


def test_hooks_change_places() -> None:
    order: list[int] = []
    model = torch.nn.Linear(1, 1)
    hooks = [model.register_forward_hook(lambda *_, i=i: order.append(i)) for i in range(4)]
    compat.put_first(hooks[2])
    compat.put_last(hooks[0])
    model(torch.zeros(1))
    assert order == [2, 1, 3, 0]
    hooks[3].remove()
    compat.put_last(hooks[3])  # of what is gone


def test_what_was_changed_in_place() -> None:
    y = leaf().exp()
    y.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    assert compat.is_overwritten(caught.value)
    assert not compat.is_overwritten(RuntimeError("out of memory"))
