"""Floats that change from call to call, with Inductor: compiled once, and Python's promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile import compat
from megacompile.passes.stages.floats import check_floats, compiled

pytestmark = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="no C++ compiler here")

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


def inputs(dtype: torch.dtype) -> Tensor:
    x = torch.linspace(-2, 2, 9)
    x[4] = 0.3
    return x.mul(3).to(dtype) if dtype == torch.int64 else x.to(dtype)


def assert_as_plain(want: Tensor, got: Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    places = 1e-2 if want.dtype in (torch.bfloat16, torch.float16) else 1e-5
    torch.testing.assert_close(got, want, rtol=places, atol=places, msg=lambda t: f"{what}: {t}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_an_operator_does_what_it_does_with_a_number(dtype: torch.dtype) -> None:
    x = inputs(dtype)

    def all_of_them(x: Tensor, t: Any) -> list[Tensor]:
        return [operator(x, t) for operator in OPERATORS.values()]

    module = traced(all_of_them, [x], {T: 0.3})
    check_floats(module)
    function = compiled(module)
    for t in (0.3, 0.7, 1.9):
        for name, want, got in zip(OPERATORS, all_of_them(x, t), function(x, t), strict=True):
            assert_as_plain(want, got, f"{name} of {t}")


def test_a_tensor_without_dimensions_decides_no_dtype() -> None:
    x = torch.tensor(0.5)
    function = compiled(traced(lambda x, t: [x * t, x > t, x.bfloat16() - t], [x], {T: 0.3}))
    assert [value.dtype for value in function(x, 0.25)] == [
        torch.float32,
        torch.bool,
        torch.bfloat16,
    ]


def test_a_float_that_makes_an_int_is_refused() -> None:
    with pytest.raises((compat.UntraceableSymbols, TypeError)):
        check_floats(traced(lambda x, t: [x.new_zeros(torch.sym_int(t * 9))], [X], {T: 0.5}))


def test_a_list_of_floats_is_refused() -> None:
    module = traced(lambda x, t: [x * t], [X], {T: 0.5})
    (node,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    x, t = node.args
    node.target, node.args = torch.ops.aten._foreach_mul.ScalarList, ([x], [t])
    with pytest.raises(compat.UntraceableSymbols, match="takes a float that changes"):
        check_floats(module)


def test_what_inductor_asks_of_sizes_is_a_condition_of_the_trace() -> None:
    asked, traced_in = (compat.SymbolicFakes({T: 0.5, ROWS: 6}) for _ in range(2))
    asked = asked.without_floats()
    assert bool(asked.number(ROWS) < 10)
    traced_in.require_of(asked)
    assert traced_in.holds(0.7, 9) and not traced_in.holds(0.5, 10)


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
