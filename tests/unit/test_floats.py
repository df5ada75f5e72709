"""Code for Inductor: floats that change, and images with their channels last.

And the code of a stage: constants that are equal; passes take time
in proportion to the layers of a model.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile import compat
from megacompile.ir.capture import constant_key, function_key
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.stages.lower import with_strides
from megacompile.passes.stages.numbers import check_floats, compiled
from megacompile.passes.stages.strides import lay_channels_last
from tests.capturing import Config, Kernel, Rounding
from tests.planned import planned

needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="no C++ compiler here")

X = torch.linspace(-1, 1, 6)
T = sympy.Symbol("n0", real=True)
ROWS = sympy.Symbol("n2", integer=True, positive=True)

OPERATORS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda x, t: x * t,
    "add": lambda x, t: t + x,
    "sub": lambda x, t: x - t,
    "rsub": lambda x, t: t - x,
    "div": lambda x, t: x / t,
    "rdiv": lambda x, t: t / (x + 3),
    "trunc": lambda x, t: torch.div(x, t, rounding_mode="trunc"),
    "alpha": lambda x, t: torch.add(x, x, alpha=t) if x.is_floating_point() else x + t,
    "remainder": lambda x, t: x % t,
    "fmod": lambda x, t: torch.fmod(x, t),
    "pow": lambda x, t: x.abs() ** t,
    "rpow": lambda x, t: t**x,
    "clamp": lambda x, t: x.clamp(-t, t),
    "greater": lambda x, t: x > t,
    "equal": lambda x, t: x == t,
    "where": lambda x, t: torch.where(x > 0, x, t),
    "masked_fill": lambda x, t: x.float().masked_fill(x > 0, t),
    "full": lambda x, t: x + torch.full_like(x, t),
    "fill": lambda x, t: torch.full((3,), t) * t,
    "ints": lambda x, t: torch.full((3,), t * 7, dtype=torch.int64),
    "scalar": lambda x, t: x.sum() * t,
    "computed": lambda x, t: x * ((t / 3) ** 2 - 0.25),
    "copysign": lambda x, t: torch.copysign(x, -t),
    "leaky": lambda x, t: F.leaky_relu(x.float(), t),
    "addcmul": lambda x, t: torch.addcmul(x.float(), x.float(), x.float(), value=t),
}


def traced(
    function: Callable[..., Any], values: list[Any], hints: dict[Any, Any]
) -> fx.GraphModule:
    """An ATen graph of tensors and of the symbols of `hints`, for Inductor."""
    fakes = compat.SymbolicFakes(hints)
    with fakes:
        fake = [torch.empty(v.shape, dtype=v.dtype) for v in values]
        primals = [*fake, *map(fakes.number, hints)]
        return compat.trace(
            lambda primals, _: function(*primals), primals, [], compat.inductor_decompositions()
        )


def assert_as_plain(want: Tensor, got: Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    places = 1e-2 if want.dtype in (torch.bfloat16, torch.float16) else 1e-5
    torch.testing.assert_close(got, want, rtol=places, atol=places, msg=lambda t: f"{what}: {t}")


@needs_compiler
def test_an_operator_does_what_it_does_with_a_number() -> None:
    """Of tensors of each kind; one without dimensions decides no dtype."""
    x = torch.tensor([-2.0, -1.5, -1.0, -0.5, 0.3, 0.5, 1.0, 1.5, 2.0])
    values = [x, x.bfloat16(), (3 * x).long(), torch.tensor(0.5)]

    def all_of_them(*given: Any) -> list[Tensor]:
        *xs, t = given
        return [operator(x, t) for x in xs for operator in OPERATORS.values()]

    module = traced(all_of_them, values, {T: 0.3})
    check_floats(module)
    function = compiled(module)
    names = [f"{name} of {x.dtype}" for x in values for name in OPERATORS]
    for t in (0.3, 0.7, 1.9):
        found = zip(names, all_of_them(*values, t), function(*values, t), strict=True)
        for name, want, got in found:
            assert_as_plain(want, got, f"{name} and {t}")


@needs_compiler
def test_a_float_that_makes_an_int_and_a_list_of_floats_are_refused() -> None:
    with pytest.raises((compat.UntraceableSymbols, TypeError)):
        check_floats(traced(lambda x, t: [x.new_zeros(torch.sym_int(t * 9))], [X], {T: 0.5}))
    module = traced(lambda x, t: [x * t], [X], {T: 0.5})
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    x, t = node.args
    node.target, node.args = torch.ops.aten._foreach_mul.ScalarList, ([x], [t])
    with pytest.raises(compat.UntraceableSymbols):
        check_floats(module)


@needs_compiler
def test_what_inductor_asks_of_sizes_is_a_condition_of_the_trace() -> None:
    asked, traced_in = compat.SymbolicFakes({ROWS: 6}), compat.SymbolicFakes({T: 0.5, ROWS: 6})
    assert bool(asked.number(ROWS) < 10)
    traced_in.require_of(asked)
    assert traced_in.holds(0.7, 9) and not traced_in.holds(0.5, 10)


@needs_compiler
def test_bools_and_ints_of_a_float_are_computed_ahead() -> None:
    def chosen(x: Tensor, t: Any) -> list[Any]:
        near, tenths = abs(t - 0.3) < 1e-6, torch.sym_int(t * 10)
        return [x.mean() * near, x + tenths, x.long() + tenths, x > tenths, x.new_full((), near)]

    module = traced(chosen, [X], {T: 0.3})
    check_floats(module)
    function = compiled(module)
    for t in (0.3, 0.3 + 1e-7):
        for k, (want, got) in enumerate(zip(chosen(X, t), function(X, t), strict=True)):
            assert_as_plain(want, got, f"{k} of {t}")


aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Bottleneck(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 128, 3, stride=2, padding=1, bias=False)
        self.narrow = nn.Conv2d(128, 64, 1)  # each operator chooses the strides of its 1x1
        self.second = nn.Conv2d(64, 128, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.head = nn.Linear(128, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def images(self, x: Tensor) -> Tensor:
        return self.second(self.narrow(self.first(x)))

    def plain(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        x = x + F.relu(self.norm(self.second(self.narrow(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    def flat(self, x: Tensor) -> Tensor:
        """A view that images with their channels last have not."""
        return self.images(x).view(x.shape[0], -1).sum(1)

    def sorted_rows(self, x: Tensor) -> Tensor:
        """An operator of which nothing is known."""
        return self.images(x).sort(-1).values.square().sum()

    def transposed(self, x: Tensor) -> Tensor:
        """The result is no image as it lay in memory, and is wanted as it was."""
        return self.images(x).transpose(1, 3)

    def without(self, x: Tensor) -> Tensor:
        """No convolution at all."""
        return self.head(x.mean((2, 3)) @ x.new_ones(3, 128))


def joint_of(model: Bottleneck, x: Tensor) -> fx.GraphModule:
    params = dict(model.named_parameters())

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        *values, image = primals
        held = dict(zip(params, values, strict=True))
        out = torch.func.functional_call(model, held, (image,))
        gradients = torch.autograd.grad(out, values, tangents, allow_unused=True)
        return [out, *(g for g in gradients if g is not None)]

    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(p) for p in (*params.values(), x)]
        tangents = [mode.from_tensor(torch.ones_like(model(x)))]
        return compat.trace(joint, fakes, tangents, compat.inductor_decompositions())


def nodes(module: fx.GraphModule, *targets: Any) -> list[Any]:
    return [n for n in module.graph.nodes if n.target in targets]


def laid_out(module: fx.GraphModule) -> list[bool]:
    images = [n.args[0].meta["val"] for n in nodes(module, *CONVOLUTIONS)]
    return [image.is_contiguous(memory_format=torch.channels_last) for image in images]


def results(module: fx.GraphModule) -> list[Any]:
    """The shapes and strides of a graph's results."""
    values = [n.meta["val"] for n in module.graph.output_node().all_input_nodes]
    return [(value.shape, value.stride()) for value in values]


@pytest.mark.parametrize("name", ["plain", "flat", "sorted_rows", "transposed"])
def test_results_are_as_they_were(name: str) -> None:
    model, x = Bottleneck(getattr(Bottleneck, name)).eval(), torch.randn(2, 3, 16, 16)
    joint = joint_of(model, x)
    laid = lay_channels_last(joint)
    assert laid is not joint and all(laid_out(laid)) and not all(laid_out(joint))
    assert results(laid) == results(joint)
    with torch.no_grad():
        given = [*model.parameters(), x, torch.ones_like(model(x))]
        for old, new in zip(joint(*given), laid(*given), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


def test_code_returns_traced_strides_of_size_1_too() -> None:
    """The next stage's convolutions choose their layout by them."""
    wanted = torch.zeros(4, 8, 1, 1)
    made = torch.empty_strided(wanted.shape, (8, 1, 8, 8))
    (result,) = with_strides(lambda: [made], [TensorMeta.of(wanted)])()
    assert result.stride() == wanted.stride() and result.data_ptr() == made.data_ptr()


def test_between_convolutions_nothing_is_copied() -> None:
    """But the batch, and what the pool's backward takes as a table. A graph without any is left."""
    x = torch.randn(2, 3, 16, 16)
    laid = lay_channels_last(joint_of(Bottleneck(Bottleneck.plain), x))
    clones = [n.meta["val"] for n in nodes(laid, aten.clone.default)]
    assert sum(clone.ndim == 4 and clone.shape[0] == len(x) for clone in clones) <= 2
    joint = joint_of(Bottleneck(Bottleneck.without), torch.randn(2, 3, 4, 4))
    assert lay_channels_last(joint) is joint


def calls(stages: int, **options: Any) -> int:
    """The function calls that passes make, those of generators' items among them."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # finalizers of other tests' objects are calls, too
    sys.setprofile(note)
    try:
        planned(" ".join(f"{k}F" for k in range(stages)), saved=40, **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 1, "rerun": True, "inductor": True},
        {"keep": 2, "offload": 5, "saved_on_host": 3},
        {"update": True, "reuse": True, "slots": 3, "lookahead": 1},
    ],
)
def test_twice_the_layers_take_twice_the_time(options: dict[str, Any]) -> None:
    """Those of 72 B have 80, and plans are many."""
    small, middle, large = (calls(stages, **options) for stages in (10, 20, 40))
    assert large - middle < 2.02 * (middle - small)


@dataclass
class Changeable:
    value: int = 1


EQUAL: list[Callable[[], Any]] = [
    lambda: (1, (2.0, None)),
    lambda: float("nan"),
    lambda: Rounding.HALVES,
    lambda: Kernel(False),
    lambda: Config(dtype=torch.bfloat16),
]
OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ((True,), Kernel(True)),
    (Rounding.HALVES, Rounding.QUARTERS),
    (Config(Rounding.HALVES), Config(Rounding.QUARTERS)),
]


def around(value: Any, default: int = 0) -> Callable[[], Any]:
    def function(given: int = default) -> Any:
        return value, given

    return function


def test_constants_and_closures_are_told_by_what_they_are() -> None:
    shared, other = [1], [1]
    for one, same in [
        *((constant_key(make()), constant_key(make())) for make in EQUAL),
        (function_key(around(shared)), function_key(around(shared))),
    ]:
        assert one == same and hash(one) == hash(same)
    for first, second in OTHERS:
        assert constant_key(first) != constant_key(second), (first, second)
    for value in (Changeable(), [1], torch.ones(2), (1, Changeable()), object()):
        with pytest.raises(TypeError):  # it can change
            constant_key(value)
    for another in (around(other), lambda: shared, around(shared, 2000)):
        assert function_key(around(shared)) != function_key(another)
    inner = around(1)
    assert isinstance(inner, types.FunctionType)
    hidden = types.FunctionType(inner.__code__, {}, closure=(types.CellType(),))
    for function in (torch.relu, around, functools.partial(around, 1), "relu", hidden):
        assert function_key(function) is function, "what is no closure is itself"
