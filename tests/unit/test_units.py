"""`find_units`: which subtrees of the module tree become buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.ir.buckets import Unit
from megacompile.passes.stages.units import find_units

KIB = 1024


def linear(kib: int) -> nn.Linear:
    """A linear layer of `kib` KiB, without a bias."""
    return nn.Linear(16, kib * KIB // 64, bias=False)


def tree(**children: nn.Module) -> nn.Module:
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def layers(count: int, kib: int = 1) -> nn.ModuleList:
    """A repeated container."""
    return nn.ModuleList(tree(up=linear(kib), down=linear(kib)) for _ in range(count))


def shown(units: Sequence[Unit]) -> str:
    """The units' names; "*" behind those that repeat."""
    return " | ".join(unit.bucket.name + "*" * unit.repeated for unit in units)


def params(unit: Unit) -> str:
    return " ".join(param.name for param in unit.bucket.params)


NESTED = tree(groups=nn.ModuleList(tree(layers=layers(2)) for _ in range(2)))
CASES: list[tuple[nn.Module, int | None, str]] = [  # with a limit in KiB
    (
        tree(embed=linear(8), layers=layers(2), norm=linear(1)),
        None,
        "embed | layers.0* | layers.1* | norm",
    ),
    (nn.Sequential(linear(1), nn.ReLU(), linear(1)), None, "0* | 2*"),
    (
        tree(experts=nn.ModuleDict({"a": linear(1), "b": linear(1)})),
        None,
        "experts.a* | experts.b*",
    ),
    (NESTED, None, "groups.0* | groups.1*"),  # the outermost container
    (  # an inner one where the outer child is over the limit
        NESTED,
        2,
        "groups.0.layers.0* | groups.0.layers.1* | groups.1.layers.0* | groups.1.layers.1*",
    ),
    # unlike children do not repeat; those of two kinds in turn do
    (nn.ModuleList([linear(1), nn.LayerNorm(256), tree(a=linear(1))]), None, "ModuleList"),
    (
        nn.ModuleList(m for _ in "ab" for m in (linear(1), nn.LayerNorm(16))),
        None,
        "0* | 1* | 2* | 3*",
    ),
    # all where nothing repeats, or the largest subtrees under the limit, or what cannot be cut
    (tree(a=linear(1), b=tree(c=linear(2))), None, "Module"),
    (
        tree(a=linear(4), b=tree(c=linear(2)), e=tree(f=linear(4), g=linear(4))),
        4,
        "a | b | e.f | e.g",
    ),
    (tree(embed=linear(8), head=linear(2)), 4, "embed | head"),
    # tiny neighbours join, and no layers join them
    (tree(a=linear(16), b=linear(1), c=layers(2), d=linear(15)), None, "a+b | c.0* | c.1* | d"),
    (tree(a=nn.LayerNorm(16), b=layers(2, kib=64), c=linear(1)), None, "a | b.0* | b.1* | c"),
    (tree(act=nn.ReLU(), fc=linear(1), drop=nn.Dropout()), None, "Module"),
    (nn.ReLU(), None, ""),
]


@pytest.mark.parametrize(("model", "limit", "units"), CASES)
def test_which_units(model: nn.Module, limit: int | None, units: str) -> None:
    options: dict[str, Any] = {} if limit is None else {"limit_bytes": limit * KIB}
    assert shown(find_units(model, **options)) == units


def test_parameters_that_are_nobodys_alone() -> None:
    """A tied one is of the first module, a layer that is listed twice is one unit, and parameters
    of the root are a unit."""
    model = tree(embed=linear(8), layers=layers(2), head=linear(8))
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    units = find_units(model)
    assert shown(units) == "embed | layers.0* | layers.1*"
    assert params(units[0]) == "embed.weight"
    first, second = layers(2)
    model = tree(layers=nn.ModuleList([first, second, first]))
    model.register_parameter("position", nn.Parameter(torch.zeros(4, 4)))
    units = find_units(model)
    assert shown(units) == "Module | layers.0* | layers.1*"
    assert params(units[0]) == "position"
    assert not units[0].modules, "no module is within it: what uses the parameter is its stage"


def test_every_parameter_has_one_place_and_every_unit_its_modules() -> None:
    model = tree(embed=linear(8), layers=layers(3), norm=nn.LayerNorm(16), head=linear(8))
    for limit_bytes in (1 * KIB, 3 * KIB, 100 * KIB):
        units = find_units(model, limit_bytes=limit_bytes)
        places = [p.name for u in units for p in u.bucket.params]
        assert sorted(places) == sorted(name for name, _ in model.named_parameters())
    layer = model.get_submodule("layers.0")
    units = find_units(model)
    assert units[1].modules == {id(m) for m in layer.modules()}
    assert units[1].roots == {id(layer)}
    assert units[-1].roots == {id(model.norm), id(model.head)}


def test_what_is_not_float32_is_not_cast() -> None:
    model = tree(a=linear(1), b=linear(1).double())
    (unit,) = find_units(model, compute_dtype=torch.bfloat16)
    assert [param.dtype for param in unit.bucket.params] == [torch.bfloat16, torch.float64]
