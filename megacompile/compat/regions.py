"""Compile regions: what Dynamo traces once and stamps out where the same comes again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

# The operator that Dynamo writes for a region: (body, its name, *what it takes).
INVOKE = torch.ops.higher_order.invoke_subgraph  # torch 2.11 to 2.15

# Does Dynamo reuse what it traced? Before 2.13 it traced each call, and compared the graphs.
REUSES_REGIONS = (  # torch 2.11 to 2.15
    importlib.util.find_spec("torch._dynamo.variables.invoke_subgraph") is not None
)


def as_region(function: Callable[..., Any]) -> Callable[..., Any]:  # torch 2.11 to 2.15
    """The same function, as a region of its own."""
    marked: Callable[..., Any] = torch.compiler.nested_compile_region(function)
    return marked


def has_hooks(module: torch.nn.Module) -> bool:  # torch 2.11 to 2.15
    """Does anything but the module's own code run when it is called?"""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names) or bool(module._compiled_call_impl)


def with_module_stack(
    meta: Mapping[str, Any], replaced: Mapping[int, int]
) -> dict[str, Any]:  # torch 2.11 to 2.15
    """A captured node's meta, with other modules, by their ids, that it ran in."""
    stack = {}
    for key, entry in (meta.get("nn_module_stack") or {}).items():
        module_id, at, call = str(key).partition("@")
        known = module_id.isdigit() and int(module_id) in replaced
        stack[f"{replaced[int(module_id)]}{at}{call}" if known else key] = entry
    return {"nn_module_stack": stack} if stack else {}


def body_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:  # torch 2.11 to 2.15
    """The graph that a node invokes."""
    body: fx.GraphModule = getattr(module, str(node.args[0].target))  # type: ignore[union-attr]
    return body
