"""Compile regions: what Dynamo traces once and stamps out where the same comes again."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import ChainedSource

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


@contextlib.contextmanager
def sources_renamed_once() -> Iterator[None]:  # torch 2.11 to 2.15
    """For its duration, Dynamo renames each source that two guards share once.

    To stamp out a region, it renames what each guard of the first one looks at, from the root for
    each, though most of the way is the same: `layers[0].norm.eps` to `layers[1].norm.eps`. Sources
    of torch 2.11 have no `clone`: there it does nothing.
    """
    holder: Any = ChainedSource
    plain = getattr(holder, "clone", None)
    if plain is None:
        yield
        return
    renamed: dict[tuple[int, int], tuple[Any, ...]] = {}  # by the ids of function and source

    def clone(source: Any, rename: Callable[[Any], Any] | None = None) -> Any:
        if rename is None:
            return plain(source)
        key = id(rename), id(source)
        if key not in renamed:  # with both, so that no other object gets their ids
            renamed[key] = plain(source, rename), rename, source
        return renamed[key][0]

    holder.clone = clone
    try:
        yield
    finally:
        holder.clone = plain


def has_hooks(module: torch.nn.Module) -> bool:  # torch 2.11 to 2.15
    """True if anything but the module's own code runs when it is called."""
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
