"""`find_units`: which subtrees of the module tree become buckets."""

from __future__ import annotations

from collections.abc import Sequence

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


def test_a_repeated_container_gives_a_unit_a_child() -> None:
    """The docstring's example."""
    model = tree(embed=linear(8), layers=layers(3), norm=nn.LayerNorm(16), head=linear(8))
    units = find_units(model)
    assert shown(units) == "embed | layers.0* | layers.1* | layers.2* | norm+head"
    assert params(units[1]) == "layers.0.up.weight layers.0.down.weight"
    assert params(units[-1]) == "norm.weight norm.bias head.weight"


def test_sequential_and_dict_repeat_too() -> None:
    sequential = nn.Sequential(linear(1), nn.ReLU(), linear(1))
    assert shown(find_units(sequential)) == "0* | 2*"
    experts = nn.ModuleDict({"a": linear(1), "b": linear(1)})
    assert shown(find_units(tree(experts=experts))) == "experts.a* | experts.b*"


def test_the_outermost_container_counts() -> None:
    model = tree(groups=nn.ModuleList(tree(layers=layers(2)) for _ in range(2)))
    assert shown(find_units(model)) == "groups.0* | groups.1*"


def test_an_inner_container_counts_where_the_outer_child_is_over_the_limit() -> None:
    model = tree(groups=nn.ModuleList(tree(layers=layers(2)) for _ in range(2)))
    assert shown(find_units(model, limit_bytes=2 * KIB)) == (
        "groups.0.layers.0* | groups.0.layers.1* | groups.1.layers.0* | groups.1.layers.1*"
    )


def test_unlike_children_do_not_repeat() -> None:
    model = nn.ModuleList([linear(1), nn.LayerNorm(256), tree(a=linear(1))])
    assert shown(find_units(model)) == "ModuleList"
    alternating = nn.ModuleList([linear(1), nn.LayerNorm(16), linear(1), nn.LayerNorm(16)])
    assert shown(find_units(alternating)) == "0* | 1* | 2* | 3*"


def test_where_nothing_repeats_the_whole_model_is_a_unit() -> None:
    assert shown(find_units(tree(a=linear(1), b=tree(c=linear(2))))) == "Module"


def test_where_nothing_repeats_units_are_the_largest_subtrees_under_the_limit() -> None:
    model = tree(a=linear(4), b=tree(c=linear(2), d=linear(2)), e=tree(f=linear(4), g=linear(4)))
    assert shown(find_units(model, limit_bytes=4 * KIB)) == "a | b | e.f | e.g"


def test_a_module_over_the_limit_is_one_unit_if_it_cannot_be_cut() -> None:
    model = tree(embed=linear(8), head=linear(2))
    assert shown(find_units(model, limit_bytes=4 * KIB)) == "embed | head"


def test_a_tied_parameter_belongs_to_the_first() -> None:
    model = tree(embed=linear(8), layers=layers(2), head=linear(8))
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    units = find_units(model)
    assert shown(units) == "embed | layers.0* | layers.1*"
    assert params(units[0]) == "embed.weight"


def test_parameters_tied_within_a_unit_are_held_once() -> None:
    model = tree(a=linear(1), b=linear(1))
    model.b.weight = model.a.weight  # type: ignore[union-attr]
    (unit,) = find_units(model)
    assert params(unit) == "a.weight"


def test_a_layer_listed_twice_is_one_unit() -> None:
    first, second = layers(2)
    model = tree(layers=nn.ModuleList([first, second, first]))
    assert shown(find_units(model)) == "layers.0* | layers.1*"


def test_tiny_neighbours_join() -> None:
    model = tree(embed=linear(16), position=linear(1), layers=layers(2), norm=linear(1))
    model.add_module("head", linear(15))
    assert shown(find_units(model)) == "embed+position | layers.0* | layers.1* | norm | head"


def test_layers_do_not_join_tiny_neighbours() -> None:
    model = tree(scale=nn.LayerNorm(16), layers=layers(2, kib=64), norm=nn.LayerNorm(16))
    assert shown(find_units(model)) == "scale | layers.0* | layers.1* | norm"


def test_root_level_parameters_are_a_unit() -> None:
    model = tree(layers=layers(2))
    model.register_parameter("position", nn.Parameter(torch.zeros(4, 4)))
    units = find_units(model)
    assert shown(units) == "Module | layers.0* | layers.1*"
    assert params(units[0]) == "position"
    assert not units[0].modules, "no module is within it: what uses the parameter is its stage"


def test_every_parameter_has_one_place() -> None:
    model = tree(embed=linear(8), layers=layers(3), norm=nn.LayerNorm(16), head=linear(8))
    model.register_parameter("position", nn.Parameter(torch.zeros(4, 4)))
    for limit_bytes in (1 * KIB, 3 * KIB, 100 * KIB):
        places = [
            p.name for u in find_units(model, limit_bytes=limit_bytes) for p in u.bucket.params
        ]
        assert sorted(places) == sorted(name for name, _ in model.named_parameters())


def test_modules_of_a_unit_are_its_subtree_and_the_roots_their_tops() -> None:
    model = tree(embed=linear(8), layers=layers(2), norm=nn.LayerNorm(16), head=linear(8))
    units = find_units(model)
    layer = model.get_submodule("layers.0")
    assert units[1].modules == {id(m) for m in layer.modules()}
    assert units[1].roots == {id(layer)}
    assert units[-1].roots == {id(model.norm), id(model.head)}


def test_what_has_no_parameters_is_no_unit() -> None:
    assert shown(find_units(tree(act=nn.ReLU(), fc=linear(1), drop=nn.Dropout()))) == "Module"
    assert find_units(nn.ReLU()) == ()
