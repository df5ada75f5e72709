"""What a backward needs in memory that others have too, and what it changes in place itself.

Each case trains the plain model and the streamed one. A tensor is changed between forward and
backward: where autograd refuses, so must we; where it does not, gradients are equal. Or a hook or a
function of autograd changes it in the backward: that runs in eager mode.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import BackwardError, megacompile
from tests.equality.nets import Applies, assert_alike, in_a_row, train, with_adamw
from tests.zoo import assert_same, twins

WIDE = torch.randn(8, 8)  # a tensor that the models read without having it


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def table() -> Tensor:
    """A constant of the captured graph."""
    return WIDE


def block(m: Any, x: Tensor) -> Tensor:
    return x + m.last(torch.tanh(m.first(x)))


Use = Callable[["Net", Tensor, Tensor], Any]


class Net(nn.Module):
    """Two blocks, and a loss in which another tensor is used."""

    scale: Tensor

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(in_a_row(block, width=8) for _ in range(2))
        self.register_buffer("scale", torch.randn(8, 8))
        self.gain = nn.Parameter(torch.randn(8))  # for code in eager mode
        self.use = use

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.use(self, x, other)


def refill(net: Net, x: Tensor, other: Tensor, out: Any) -> None:
    with torch.no_grad():
        other.copy_(other.flip(0))


def exp_of_body(n: Net, x: Tensor, o: Tensor) -> Any:
    z = n.body(x).exp()
    return z.sum(), z.detach().t()


@dataclasses.dataclass
class Case:
    """What the loss is made of, and what is done behind the forward."""

    use: Use
    change: Callable[[Any, Any, Any, Any], object] = refill  # of the net, the inputs and the output
    other: Callable[[], Tensor] = lambda: torch.randn(8, 8)
    refused: bool = True


CASES = {  # more of them: tests/frames, "changed"
    "the matrix of a product": Case(lambda n, x, o: (n.body(x) @ o).sum()),
    "chunks": Case(lambda n, x, o: (n.body(x)[:, :4] * o.chunk(2, -1)[1]).sum()),
    "a parameter outside": Case(
        lambda n, x, o: (n.body(x) @ o.t()).square().sum(),
        other=lambda: torch.randn(8, 8, requires_grad=True),
    ),
    "a constant": Case(
        lambda n, x, o: (n.body(x) @ table().t()).sum(), lambda n, x, o, y: WIDE.neg_()
    ),
    "an output": Case(
        lambda n, x, o: [n.body(x).exp()] * 2, lambda n, x, o, y: y[1].detach().mul_(2)
    ),
    "a view of an output": Case(exp_of_body, lambda n, x, o, y: y[1].mul_(2)),
    "an output that is a view of an input": Case(
        lambda n, x, o: ((n.body(x) @ o.t()).sum(), o.view(-1)), lambda n, x, o, y: y[1].mul_(2)
    ),
    "what one stage saves and another can compute from": Case(
        lambda n, x, o: torch.tanh(n.body(n.body(x) @ o) + o).sum()
    ),
    "through .data": Case(
        lambda n, x, o: (n.body(x) @ o.t()).sum(), lambda n, x, o, y: o.data.mul_(2), refused=False
    ),
    "what a copy is made of": Case(
        lambda n, x, o: (n.body(x) * o.t().flatten().view(8, 8)).sum(), refused=False
    ),
    "what a nonlinear layer is behind": Case(
        lambda n, x, o: torch.tanh(n.body(x) + o).sum(), refused=False
    ),
    "another tensor": Case(
        lambda n, x, o: (n.body(x) @ o.t()).sum(),
        lambda n, x, o, y: (n.scale.mul_(2), WIDE.neg_()),
        refused=False,
    ),
}


def run(net: nn.Module, case: Case) -> type[Exception] | None:
    """Train twice, with a change before each backward; gives the class of the first error."""
    torch.manual_seed(1)
    for _ in range(2):
        x, other = torch.randn(2, 8, 8)[0], case.other()
        out = net(x, other)
        with torch.no_grad():
            case.change(net, x, other, out)
        loss = out[0].sum() if isinstance(out, (tuple, list)) else out
        try:
            loss.backward()
        except RuntimeError as error:
            assert isinstance(error, BackwardError) or "inplace operation" in str(error)
            return type(error)
    return None


def pair(case: Case, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net(case.use)
    options = {"lowering": "eager", "activations": "keep"} | options
    return plain, megacompile(copy.deepcopy(plain), device="cpu", progress=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_refuses(name: str) -> None:
    """And no more. Every fourth one with what is computed again, too."""
    case = CASES[name]
    again = list(CASES).index(name) % 4 == 0
    for activations in ("keep", "recompute")[: 1 + again]:
        plain, streamed = pair(case, activations=activations)
        assert bool(run(plain, case)) == case.refused
        assert run(streamed, case) is (BackwardError if case.refused else None)
        if not case.refused:
            assert_same(plain, streamed)


def test_what_is_large_is_not_copied_for_a_backward() -> None:
    """Autograd accepts the change; a copy of the tensor would be in no plan."""
    case = Case(
        lambda net, x, other: (net.body(x).sum() * other.double().float()).sum(),
        other=lambda: torch.randn(1024, 1024),
    )
    plain, streamed = pair(case)
    assert run(plain, case) is None and run(streamed, case) is BackwardError


@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_parameter_that_code_in_eager_mode_has_saved() -> None:
    """A product and a function of autograd save it, a sum does not."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return gradients[0] * weight, None

    uses: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "product": lambda x, weight: x * weight,
        "function": Times.apply,
        "sum": lambda x, weight: x + weight,
    }
    eagerly = torch.compiler.disable(lambda name, x, weight: uses[name](x, weight))
    for name in uses:

        def use(net: Any, x: Tensor, other: Tensor, name: str = name) -> Any:
            return eagerly(name, net.body(x), net.gain).sum()

        case = Case(use, lambda net, x, other, out: net.gain.detach().mul_(2))
        plain, streamed = pair(case)
        assert [bool(run(net, case)) for net in (plain, streamed)] == [name != "sum"] * 2
        if name == "sum":
            assert_same(plain, streamed)


def test_the_same_backward_twice() -> None:
    case = CASES["the matrix of a product"]
    for net, error in zip(pair(case), (RuntimeError, BackwardError), strict=True):
        other = torch.randn(8, 8)
        loss = net(torch.randn(8, 8), other)
        loss.backward(retain_graph=True)
        other.mul_(2)
        with pytest.raises(error, match="in.?place"):
            loss.backward()


def test_what_was_copied_is_right() -> None:
    """The forward changes a buffer, and works with the new value. A second one changes it again;
    the first one's backward has the value that it had (where autograd refuses)."""

    def use(net: Net, x: Tensor, other: Tensor) -> Tensor:
        net.scale.copy_(other)  # a cache
        return (net.body(x) @ net.scale.t()).sum()

    plain, streamed = pair(Case(use))
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    for batch in batches:
        plain(*batch).backward()
    for loss in [streamed(*batch) for batch in batches]:
        loss.backward()
    assert_same(plain, streamed)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_later_layer_changes_a_buffer(activations: str) -> None:
    """What the backward needs of it is copied ahead of that, or refused as autograd refuses it."""

    def use(net: Net, x: Tensor, other: Tensor) -> Tensor:
        scale = net.scale.clone() if len(other) > 1 else net.scale
        x = net.blocks[1](net.blocks[0](net.blocks[0](x) @ scale.t()))
        with torch.no_grad():
            net.scale.mul_(0.5)
        return x.sum()

    plain, streamed = pair(Case(use), activations=activations)
    x = torch.randn(8, 8)
    plain(x, torch.ones(2)).backward()
    try:
        streamed(x, torch.ones(1)).backward()
    except BackwardError:
        assert activations == "keep"
    else:
        assert_same(plain, streamed)


def test_nothing_holds_an_output() -> None:
    """Its node would: the saved values are in its memory, and the node has them."""
    _, streamed = pair(CASES["an output"])
    gc.disable()
    try:
        out = streamed(torch.randn(8, 8), torch.randn(8, 8))
        gone = weakref.ref(out[0].grad_fn)
        del out
        assert gone() is None
    finally:
        gc.enable()


def reads_back(m: Any, grad: Tensor) -> Tensor:
    """Gradients depend on what the backward before has left."""
    scaled = grad / (1 + m.amax + m.seen.max())
    m.seen.copy_(m.seen.roll(1))
    m.seen[0].copy_(grad.abs().amax())
    m.amax.copy_(m.seen.max())
    return scaled


HOOKS: list[Callable[[Any, Tensor], Any]] = [
    reads_back,
    lambda m, grad: (m.first.copy_(grad.abs().amax()), grad)[1],  # a view that the forward has made
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_backward_that_writes_runs_in_eager_mode(hook: Any) -> None:
    """Other writes, by hooks and by functions of autograd: tests/frames."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.linear(x) * (1 + m.amax + m.seen.sum())
        m.first = m.seen[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: hook(m, grad))
        return hidden.tanh()

    buffers: Any = {"amax": torch.zeros(()), "seen": torch.zeros(3)}
    layers = [Applies(forward, linear=nn.Linear(4, 4), **copy.deepcopy(buffers)) for _ in range(2)]
    pairs = with_adamw(twins(nn.Sequential(*layers)))
    with pytest.warns(UserWarning, match="eager mode"):
        train(pairs, lambda model, seed: model(torch.randn(3, 4)).square().sum())


def test_a_hook_changes_what_another_layer_gave() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.layers[0](x)
        given = x.detach() * 1
        x = m.layers[2](m.layers[1](x))

        def hook(grad: Tensor) -> Tensor:
            given.mul_(2)
            return grad * given

        x.register_hook(hook)
        return x.square().sum()

    models = twins(Applies(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))))
    with pytest.warns(UserWarning, match="eager mode"):
        assert_alike(models, lambda model: model(torch.ones(3, 4)).backward())
