"""Code that Dynamo cannot capture, or captures anew: slower, never wrong, and said once; and models
that one pass each is for. They are streamed next to plain: equal in every bit, call after call."""

from __future__ import annotations

import copy
import functools
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megacompile import schedules
from megacompile.errors import ModelError
from tests import capturing, inside, zoo
from tests.equality import nets
from tests.equality.nets import Applies, assert_alike, in_a_row, said, trained
from tests.quantized import Int8
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, twins


class Net(nn.Module):
    """Its product has the wrong width where the input has, maybe behind a graph break."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.breaks:
            self.calls += 1
        x = self.drop(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
            self.calls += 1
        return self.linear(x)


def failure(model: nn.Module, x: Tensor) -> tuple[str, list[str]]:
    """What is raised, and the lines of this file that it came through."""
    torch.manual_seed(1)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    assert type(caught.value) is RuntimeError
    frames = traceback.extract_tb(caught.value.__traceback__)
    lines = [str(at.line) for at in frames if at.filename == __file__]
    return str(caught.value), lines[-1:]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_wrong_shape_is_the_plain_models_error(breaks: bool) -> None:
    """In the first call and later; no line runs twice, calls in between are captured."""
    plain, model = twins(Net(breaks=breaks))
    wrong, right = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    with said() as texts:
        for x in (wrong, right, wrong, right):
            if x is wrong:
                assert failure(model, x) == failure(plain, x)
                assert failure(plain, x)[1] == ["return self.linear(x)"]
                plain.calls -= 1
                plain.norm.load_state_dict(model.norm.state_dict())  # of one call more
                continue
            found = []
            for each in (model, plain):
                torch.manual_seed(2)
                found.append(each(x))
                found[-1].sum().backward()
            assert equal(*(value.detach() for value in found))
            assert_same(plain, model)
    assert model.calls == plain.calls == 4 and texts == []
    assert inside.programs(model)


class Untraced(nn.Module):
    """Dynamo cannot trace what is behind its layers, a graph break, or in a function that code
    calls which runs in eager mode."""

    def __init__(self, act: Callable[[Tensor, float], Tensor], where: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 4)
        self.act = act
        self.where = where
        self.calls: list[float] = []

    def forward(self, x: Tensor, number: float) -> Tensor:
        if self.where == "in a skipped frame":
            for _ in range(1):
                torch._dynamo.graph_break()
                x = self.layers(x)
                x = self.ending(x, number)
            return x
        x = self.layers(x)
        if self.where == "behind a break":
            torch._dynamo.graph_break()
        self.calls.append(number)
        return self.act(self.last(x), number)

    def ending(self, x: Tensor, number: float) -> Tensor:
        self.calls.append(number)
        return self.act(self.last(x), number)


def no_gradient_at_first(x: Tensor, number: float) -> Tensor:
    with torch.set_grad_enabled(number > 1):
        return x * 2


WHERE = ("first", "behind a break", "in a skipped frame")
UNTRACED: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "no fake tensors": (lambda x, _: nets.real_only(x.detach()) + x, (1.0, 2.0)),
    "a negative float": (lambda x, number: x + number**2, (-0.5, -0.25, -0.1)),
    "a mode": (no_gradient_at_first, (1, 2, 3)),
    "a condition as an index": (lambda x, number: x + (1.0, 0.5)[number > 2], (1, 3, 2)),
}


@pytest.mark.parametrize(
    ("case", "where"),
    [
        *(("no fake tensors", where) for where in WHERE),
        ("a negative float", "behind a break"),
        ("a mode", "first"),
        ("a condition as an index", "first"),
    ],
)
def test_what_dynamo_cannot_trace_runs_as_it_is(case: str, where: str) -> None:
    """It is said once, and equals the plain model in every bit; no line runs twice."""
    act, numbers = UNTRACED[case]
    models = plain, model = twins(Untraced(act, where))
    optimizers = {m: torch.optim.AdamW(m.parameters()) for m in (plain, model)}

    def use(m: Any, number: float) -> Any:
        output = trained(torch.ones(2, 4), number)(m)
        if output.requires_grad:
            optimizers[m].step()
        return output

    with said() as texts:
        for number in (*numbers, *numbers):
            assert_alike(models, functools.partial(use, number=number))
    assert model.calls == plain.calls == [*numbers, *numbers]
    untraced = [text for text in texts if "could not trace" in text]
    if not untraced and case == "a condition as an index":
        pytest.skip("this torch traces it")
    assert len(untraced) == 1
    assert where == "in a skipped frame" or len(texts) == 1


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ONES = torch.ones(4, 6)
KINDS: dict[str, Any] = {
    "tensor": ONES,
    "rows": torch.ones(3, 6),
    "dtype": ONES.double(),
    "strides": torch.ones(6, 4).t(),
    "requires grad": ONES.clone().requires_grad_(),
    "int": 3,
    "float": 3.0,
    "bool": True,
    "zero": 0.0,
    "nan": float("nan"),
    "parameter": nn.Parameter(ONES.clone(), requires_grad=False),
}
STATES: dict[str, Callable[[], Any]] = {
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "deterministic": deterministic,
}


def test_each_kind_of_call_has_a_program_and_keeps_it() -> None:
    """Of inputs, and of states of the thread and the process."""
    plain, model = twins(
        Applies(lambda m, x: m.weight * x, weight=nn.Parameter(torch.ones(6))), dynamic=False
    )
    calls: list[tuple[str, Callable[[], Any], Any]] = [
        (name, nullcontext, value) for name, value in KINDS.items()
    ]
    calls += [(name, state, ONES) for name, state in STATES.items()]
    counts = []
    for name, state, value in (*calls, *calls):
        with state():
            assert_alike((plain, model), operator.methodcaller("__call__", value), name=name)
        counts.append(len(inside.programs(model)))
    assert counts == [*range(1, len(calls) + 1)] + [len(calls)] * len(calls)


def test_how_a_packed_parameter_is_put_together_is_part_of_the_key() -> None:
    """The same parts, read as another dtype, are another weight; so is another layer of the same
    code, and one that is frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for layer, dtype in zip(layers, (torch.float32, torch.bfloat16), strict=True):
        weight = Int8.of(layers[0].weight.detach())
        packed = Int8(weight.data8, weight.scale, dtype, weight.device)
        layer.weight = nn.Parameter(packed, requires_grad=False)

    def forward(m: Any, x: Tensor, i: int) -> Tensor:
        weight = m.layers[i].weight
        y = F.linear(x.to(weight.dtype), weight)
        torch._dynamo.graph_break()
        return m.others[i](y.float())

    others = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    models = twins(Applies(forward, layers=nn.ModuleList(layers), others=others))
    for is_trained in (True, False):
        for model in models:
            model.others[1].requires_grad_(is_trained)
        for i in (0, 1, 0):
            assert_alike(models, trained(torch.ones(2, 4), i))


pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def annealed() -> Any:
    """Rates of a function and of modules, as keywords and by position, and in place."""

    def forward(m: Any, x: Tensor, rate: float) -> Tensor:
        m.drop.p = rate
        x = m.drop(m.first(x))
        x = F.dropout(m.middle(x).tanh(), p=m.drop.p, training=m.training)
        x = F.dropout(m.last(x) * 2, m.drop.p, m.training, True)
        return x.square().mean()

    return in_a_row(forward, count=3, width=8, drop=nn.Dropout(0.1))


def mix(m: Any, x: Tensor) -> Tensor:
    """As the attention of an autoencoder: the stride of its batch of one is that of the sum's
    kernel."""
    y: Tensor = m.first(x.flatten(2).transpose(1, 2))
    return y.transpose(-1, -2).reshape(x.shape) + x


def pictures(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x.square().sum()


def of_pictures() -> Any:
    """The group norm goes by the strides that it gets, and the convolution by what that gives."""

    def block() -> nn.Module:
        made: dict[str, Any] = {"norm": nn.GroupNorm(4, 8), "conv": nn.Conv2d(8, 8, 3, padding=1)}
        return Applies(lambda m, x: m.conv(F.silu(m.norm(x))) + x, **made)

    layers = [block(), in_a_row(mix, count=1, width=8), block(), block()]
    return Applies(pictures, layers=nn.ModuleList(layers))


def mapped(m: Any, x: Tensor) -> Tensor:
    """A layer whose weight acts on each row, by way of vmap."""
    mapped = torch.vmap(lambda row, w: row * w.tanh() + 1, in_dims=(0, None))(x, m.weight)
    both: Tensor = torch.vmap(torch.vmap(torch.mul), in_dims=1, out_dims=1)(mapped, x)
    return m.first(both + mapped)


def weighted() -> Any:
    return in_a_row(mapped, count=1, width=8, weight=nn.Parameter(torch.linspace(-1, 1, 8)))


def mapping(m: Any, x: Tensor) -> Tensor:
    """Some of its layers are under a checkpoint."""
    for i, layer in enumerate(m.layers):
        x = checkpoint(layer, x, use_reentrant=False) if i % 2 else layer(x)
    return x.square().sum()


@dataclass(frozen=True)
class Row:
    """A model, the calls that it is trained with, and its schedules and templates then."""

    model: Callable[[], nn.Module]
    calls: Callable[[], Iterable[tuple[Any, ...]]]
    schedules: int
    templates: int | None = None  # of the last schedule


ROWS: dict[str, Row] = {
    "dropout rates": Row(annealed, lambda: [(rows(6), p) for p in (0.1, 0.2)], 2),
    "strides": Row(
        of_pictures,
        lambda: [(rows(144).view(1, 8, 12, 12),)] * 2,
        1,
    ),
    "vmap": Row(
        lambda: Applies(mapping, layers=nn.ModuleList(weighted() for _ in range(4))),
        lambda: [(rows(2),)] * 2,
        1,
        3,
    ),
    "layers of a function that is left whole": Row(
        capturing.of_products, lambda: [(torch.linspace(-1, 1, 8).view(2, 4),)] * 2, 1, 3
    ),
}


def drawing(*args: Any) -> nets.Use:
    """A call, its backward, and the next random number."""
    return lambda model: (trained(*args)(model), torch.rand(1))


@pytest.mark.parametrize("name", ROWS)
def test_streamed_is_plain(name: str) -> None:
    told = ROWS[name]
    torch.manual_seed(0)
    plain, streamed = twins(told.model(), progress=False)
    for args in told.calls():
        assert_alike((plain, streamed), drawing(*args))
    found = schedules(streamed)
    assert len(found) == told.schedules, "for all calls"
    assert told.templates in (None, len(found[-1].templates))
    plain.eval(), streamed.eval()
    with torch.no_grad():
        assert_alike((plain, streamed), drawing(*next(iter(told.calls()))))


# Code that cannot be traced on zeros: what it computes from them is an index that there is not.


def _last(mask: Tensor) -> Tensor:
    return mask.sum(1) - 1


LOOK_UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda h, m: h.gather(1, _last(m)[:, None, None].expand(-1, 1, 8)),
    "cross_entropy": lambda h, m: F.cross_entropy(h[:, 0], _last(m)),
    "divided": lambda h, m: h * (7 // m.sum(1))[:, None, None],
    "inverse": lambda h, m: torch.linalg.inv(
        h.transpose(1, 2) @ h + torch.diag_embed(h[:, 0] ** 2)
    ),
}


@pytest.mark.filterwarnings("ignore:megacompile. Applies is not scheduled.*side effects")
def test_code_that_raises_on_zeros() -> None:
    for name, code in LOOK_UPS.items():

        def forward(m: Any, x: Tensor, mask: Tensor, code: Any = code) -> Tensor:
            return code(m.last(torch.tanh(m.first(x))), mask).square().sum()

        plain, streamed = twins(in_a_row(forward, width=8))
        for seed in range(2):
            mask = torch.randint(2, (3, 5), generator=torch.Generator().manual_seed(seed))
            mask[:, 0] = 1
            assert_alike((plain, streamed), trained(rows(15, seed).view(3, 5, 8), mask))
        if name == "gather":
            with pytest.raises(RuntimeError, match="index -1"):
                streamed(rows(15).view(3, 5, 8), torch.zeros(3, 5, dtype=torch.int64))


def test_a_frozen_parameter_is_changed_between_calls_of_code_that_is_not_captured() -> None:
    """Autograd saves it for the input's gradient before the operator looks whether it changed."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = F.layer_norm(m.first(x), (8,), m.last.bias)
        return out.square().sum()

    plain, streamed = twins(in_a_row(forward, width=8))
    for model in (plain, streamed):
        model.last.bias.requires_grad_(False)
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    for seed in range(3):
        assert_alike((plain, streamed), trained(rows(4, seed)))
        for model in (plain, streamed):
            model.load_state_dict(state)


def routed(convert: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any]:
    """A layer is converted in the forward, as the router of Switch Transformers does."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.first = convert(m.first)
        return m.first(x) * m.first.get_buffer("scale")

    def block() -> Any:
        made = in_a_row(forward, count=1, width=WIDTH)
        made.first.register_buffer("scale", torch.ones(()))
        return made

    return twins(Stack(layers=2, block=block))


@pytest.mark.parametrize("way", [lambda convert: convert, torch.compiler.disable])
def test_parameters_are_converted_as_plain_ones_are(way: Callable[..., Any]) -> None:
    """To what they are, also frozen ones; to another dtype is refused, changing nothing. The
    conversion alone may not be captured."""
    plain, streamed = routed(way(lambda layer: layer.to("cpu", torch.float32).float()))
    params = list(streamed.parameters())
    for model in (plain, streamed):
        model.layers[1].requires_grad_(False)
    for _ in range(2):  # gradients add up
        zoo.assert_steps_same(plain, streamed, batch())
    for model in (plain, streamed):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    zoo.assert_steps_same(plain, streamed, batch())
    assert all(a is b for a, b in zip(params, streamed.parameters(), strict=True))
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(streamed).parameters())
    plain, streamed = routed(way(lambda layer: layer.double()))
    with pytest.raises(ModelError, match="float64"):
        streamed(**batch())
    assert_same(plain, streamed)
