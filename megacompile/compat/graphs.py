"""FX graphs: fast creation of nodes, and the nodes that Dynamo writes into captured graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._functorch import predispatch
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import checkpoint

_ARGS: Any = fx.Node.args  # its setter skips the graph's table of targets
_KWARGS: Any = fx.Node.kwargs


# `node.args = args` and `node.kwargs = kwargs`, in a fraction of the time: a search creates a
# million nodes.
set_args: Callable[[fx.Node, Any], None] = _ARGS.fset
set_kwargs: Callable[[fx.Node, Any], None] = _KWARGS.fset

# `fx.GraphModule(root, graph)` that generates its Python code on first use.
graph_module: Callable[[nn.Module, fx.Graph], fx.GraphModule] = _LazyGraphModule


def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Call a `graph_module` without torch.fx's wrapper, which prints its code if it raises."""
    _LazyGraphModule.force_recompile(module)
    return module.forward(*inputs)


def write_powers() -> None:
    """Makes FX write the base of a power in parentheses, permanently. It writes `-1 ** x` for a
    base of -1, which Python parses as `-(1 ** x)`."""
    fx.graph.magic_methods["pow"] = "({}) ** {}"


def new_node(
    graph: fx.Graph,
    op: str,
    target: Callable[..., Any] | str,
    name: str,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """`graph.create_node(op, target, args, kwargs, name)` for a graph without hooks on new nodes,
    and arguments without symbols; faster for an unused name with a digit."""
    names = graph._graph_namespace
    plain = name.isascii() and name.isidentifier() and not name.replace("_", "").isalpha()
    if not plain or name in names._used_names:
        node = graph.create_node(op, target, name=name)
        set_args(node, args)
        if kwargs:
            set_kwargs(node, kwargs)
        return node
    names._used_names.add(name)
    return _added(graph, op, target, name, args, kwargs)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the same names and metadata."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args = fx.map_arg(node.args, nodes.__getitem__)
        kwargs = fx.map_arg(node.kwargs, nodes.__getitem__) if node.kwargs else None
        new = _added(copied, node.op, node.target, node.name, args, kwargs)
        new.meta.update(node.meta)
        nodes[node] = new
    copied._graph_namespace._used_names.update(node.name for node in nodes)
    return copied


def _added(
    graph: fx.Graph, op: str, target: Callable[..., Any] | str, name: str, args: Any, kwargs: Any
) -> fx.Node:
    """Insert a node of exactly this name at the graph's insertion point."""
    node = fx.Node(graph, name, op, target, args, kwargs or {})
    graph._graph_namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


_TRANSFORMS = tuple(
    f"torch.{name}"
    for name in ("_C._functorch", "_functorch.predispatch", "_functorch.eager_transforms")
)

# The nodes that Dynamo writes for grad mode and autocast.
SET_GRAD_ENABLED = torch._C._set_grad_enabled
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

# Dynamo's operator for torch.utils.checkpoint, and the keywords of checkpoint() itself.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)
CHECKPOINT_OPTIONS = _OPTIONS | {"preserve_rng_state"}

# The calls that Dynamo writes for torch.vmap, from BEGIN to END; LOAD is needed once.
VMAP_LOAD = predispatch.lazy_load_decompositions
VMAP_BEGIN = predispatch._vmap_increment_nesting
VMAP_END = predispatch._vmap_decrement_nesting
_VMAP = (VMAP_LOAD, VMAP_BEGIN, VMAP_END, predispatch._add_batch_dim, predispatch._remove_batch_dim)


def transforms(module: fx.GraphModule) -> str | None:
    """The first node of `torch.func.grad` or a similar transform in a captured graph, except `vmap`
    in the graph and in its checkpoints. Transforms count their nesting in global state, which a
    failed trace would leave changed."""
    plain = set(_with_checkpoints(module))
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                of_transforms = str(getattr(node.target, "__module__", "")).startswith(_TRANSFORMS)
                if of_transforms and not (inner in plain and node.target in _VMAP):
                    return str(node)
    return None


def put_inputs_first(module: fx.GraphModule) -> None:
    """Move the placeholders of a captured graph to its front, in order (torch 2.11 does not)."""
    nodes = list(module.graph.nodes)
    first = next((k for k, node in enumerate(nodes) if node.op != "placeholder"), len(nodes))
    for node in nodes[first:]:
        if node.op == "placeholder":
            nodes[first].prepend(node)


def has_while_loop(module: fx.GraphModule) -> bool:
    """True if a captured graph has a `while_loop`, whose fake kernel creates new symbols."""
    loop = torch.ops.higher_order.while_loop
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    return any(graph.find_nodes(op="call_function", target=loop) for graph in graphs)


def _with_checkpoints(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A graph and the bodies of its checkpoints, which are inlined later."""
    yield module
    for node in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
        yield from _with_checkpoints(getattr(module, str(node.args[0].target)))


@contextmanager
def keeping_nesting() -> Iterator[None]:
    """A context that leaves the vmap levels that a failed trace entered in it."""
    level = torch._C._functorch.maybe_current_level
    before = level() or 0
    try:
        yield
    finally:
        while (level() or 0) > before:
            VMAP_END()


def module_calls(node: fx.Node) -> list[tuple[int, str]]:
    """(id, call) of each module that a captured node ran in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key in stack:
        module_id, _, call = str(key).partition("@")
        if module_id.isdigit():
            calls.append((int(module_id), call))
    return calls


# Type and source of Dynamo's guards on a subclass's inner tensors, as guard filters see them.
SUBCLASS_GUARD = "TENSOR_SUBCLASS_METADATA_MATCH"
INNER_NAMES = ".__tensor_flatten__()[0]"


# Prefixes of the attributes that mark_dynamic and similar functions set on a tensor.
_MARKS = ("_dynamo_", "_specialize_on")


@dataclass(frozen=True, slots=True)
class DescribedInput:
    """One input of a captured graph, described in symbols of our own."""

    number: sympy.Symbol | None = None  # set if the input is a number
    in_tensor: bool = False  # the number is passed as a 0-d tensor
    shape: tuple[Any, ...] = ()  # of a tensor: expressions and ints
    stride: tuple[Any, ...] = ()


def described_inputs(module: fx.GraphModule) -> list[DescribedInput] | None:
    """The inputs of a graph that Dynamo captured with symbols; None if there are none to keep."""
    placeholders = module.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
    tensors = {k: value for k, value in enumerate(examples) if isinstance(value, torch.Tensor)}
    sizes = [n for value in tensors.values() for n in (*value.shape, *value.stride())]
    symbolic = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
    dims = set[Any]().union(*(expression.free_symbols for expression in symbolic))
    own: dict[Any, sympy.Symbol] = {}
    numbers: dict[int, DescribedInput] = {}
    for k, (node, value) in enumerate(zip(placeholders, examples, strict=True)):
        name = f"n{len(numbers)}"
        given, users = node.meta.get("grapharg"), node.users
        read = all(user.op == "call_method" and user.target == "item" for user in users)
        if read and getattr(given, "pass_arg_as_tensor", False):  # a Python float
            numbers[k] = DescribedInput(sympy.Symbol(name, real=True), in_tensor=True)
        elif isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            symbol = value.node.expr
            sized = {"positive": True} if symbol in dims else {}
            own[symbol] = sympy.Symbol(name, integer=True, **sized)
            numbers[k] = DescribedInput(own[symbol])
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
    if not numbers or not dims <= own.keys():
        return None
    known = {
        k: DescribedInput(shape=_own(value.shape, own), stride=_own(value.stride(), own))
        for k, value in tensors.items()
    }
    known |= numbers
    return [known.get(k, DescribedInput()) for k in range(len(examples))]


def _own(sizes: Sequence[Any], own: Mapping[Any, sympy.Symbol]) -> tuple[Any, ...]:
    return tuple(
        n.node.expr.xreplace(own) if isinstance(n, torch.SymInt) else int(n) for n in sizes
    )


def keep_dynamic_marks(source: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Returns `copy` with the marks of `torch._dynamo.mark_dynamic` and the like on `source`."""
    if copy is not source:
        for name, value in source.__dict__.items():
            if name.startswith(_MARKS):
                setattr(copy, name, value)
    return copy
