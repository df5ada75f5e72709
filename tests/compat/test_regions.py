"""What compat takes for granted of compile regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import Source

from megacompile import compat

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = region(self, x)
        return result


def twice(layer: Layer, x: Tensor) -> Tensor:
    result: Tensor = layer.linear(x).relu()
    return result


def marked() -> Callable[..., Any]:
    return compat.as_region(twice)


region = marked()


def test_a_region_is_a_call_of_a_body() -> None:
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        del examples
        found.append(module)
        return module.forward

    layers = [Layer() for _ in range(3)]
    torch.compile(nn.Sequential(*layers), backend=backend)(torch.ones(2, 4, requires_grad=True))
    (module,) = found
    calls = module.graph.find_nodes(op="call_function", target=compat.INVOKE)
    assert len(calls) == 3 and all(len(node.args) == 2 + 3 for node in calls)
    assert len({id(compat.body_of(module, node)) for node in calls}) == 1
    ran_in = [[key for key, _ in compat.module_calls(node)] for node in calls]
    assert [keys[-1] for keys in ran_in] == [id(layer) for layer in layers]
    assert compat.REUSES_REGIONS or VERSION < (2, 13), "Dynamo traces every region"


def test_modules_of_a_stack_can_be_others() -> None:
    meta = {"nn_module_stack": {"12@1": ("a", int), "34": ("b", int)}, "val": 1}
    moved = compat.with_module_stack(meta, {12: 56})
    assert moved == {"nn_module_stack": {"56@1": ("a", int), "34": ("b", int)}}
    assert compat.with_module_stack({}, {12: 56}) == {}


def test_hooks_are_seen() -> None:
    linear = nn.Linear(2, 2)
    assert not compat.has_hooks(linear)
    registers: list[Any] = [linear.register_forward_hook, linear.register_forward_pre_hook]
    registers += [linear.register_full_backward_hook, linear.register_full_backward_pre_hook]
    for register in registers:
        handle = register(lambda *args: None)
        assert compat.has_hooks(linear)
        handle.remove()
    assert not compat.has_hooks(linear)
    compat.set_compiled_call(linear, print)
    assert compat.has_hooks(linear)


def test_fake_tensors_that_remember_their_data() -> None:
    with compat.fake_mode(), compat.functional_mode():
        assert compat.has_known_data(torch.tensor(3))
        assert not compat.has_known_data(torch.ones(3))
        assert not compat.has_known_data(compat.to_functional(torch.ones(3)))


def test_a_source_that_is_renamed_once_is_the_same_as_before() -> None:
    root, other = LocalSource("layers"), LocalSource("others")
    shared = AttrSource(root, "norm")
    sources = [AttrSource(shared, "eps"), AttrSource(shared, "weight"), shared]

    def rename(source: Source) -> Source:
        return other if source == root else source

    if VERSION == (2, 11):
        with compat.sources_renamed_once():
            assert not hasattr(Source, "clone")
        return
    plain = [source.clone(rename) for source in sources]
    with compat.sources_renamed_once():
        found = [source.clone(rename) for source in sources]
        assert vars(found[0])["base"] is vars(found[1])["base"]
        assert [source.clone() for source in sources] == sources
    assert found == plain and found[0].name == "L['others'].norm.eps"
    assert sources[0].clone(rename) is not sources[0].clone(rename)
