"""Have Dynamo trace one of equal layers, and stamp it out for the others.

    before: Dynamo interprets 88 layers        after: one, and checks that the others are equal

Most of the time of a capture is Dynamo's, which interprets the Python of each layer. Where layers
are equal, each becomes a compile region (`torch.compiler.nested_compile_region`), whose reuse
Dynamo guards: by the metas of what is taken, and by what the code of the first layer read. Three
things it does not see are looked at here: that layers are built alike, down to hooks and who shares
a tensor with whom (`equal_layers`); that they are called alike, with the same tensors in the same
places and in the same mode (`_region_of`); and that each gets its own tensors (`inlined`). Whatever
is not so is captured as it always was.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat
from megacompile.ir.constants import constant_key
from megacompile.ir.tensors import TensorMeta

_LEAST = 3  # layers; fewer are not worth it
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OWN = frozenset(vars(nn.Module()))  # what every module has


class NotEqualError(Exception):
    """Layers that seemed to be equal were not captured as equal ones."""


def equal_layers(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The layers of the outermost containers whose children are all equal."""
    found: list[tuple[nn.Module, ...]] = []
    inside: set[int] = set()
    for module in compat.modules_of(model):
        layers = tuple(module.children()) if type(module) is nn.ModuleList else ()
        if id(module) in inside or len(layers) < _LEAST or not _are_equal(layers):
            continue
        found.append(layers)
        inside |= {id(inner) for layer in layers for inner in layer.modules()}
    return found


def _are_equal(layers: Sequence[nn.Module]) -> bool:
    """True if layers are built alike, with no module and no tensor that two of them have."""
    forward = type(layers[0]).forward
    if not isinstance(forward, types.FunctionType) or forward.__module__.startswith("torch."):
        return False
    first = _build(layers[0])
    owned = [set(map(id, _owned(layer))) for layer in layers]
    apart = sum(map(len, owned)) == len(set().union(*owned))
    return apart and first is not None and all(_build(layer) == first for layer in layers[1:])


def _owned(layer: nn.Module) -> Iterator[object]:
    """The modules and tensors of a layer."""
    for module in compat.modules_of(layer):
        yield module
        for holder in (compat.parameters_of(module), compat.buffers_of(module)):
            yield from (tensor for tensor in holder.values() if tensor is not None)


def _build(layer: nn.Module) -> Hashable | None:
    """Equal for layers that are built alike; None where that cannot be told.

    Whole numbers may differ, because layers know their place: what their code reads of them is
    guarded by Dynamo.
    """
    seen: dict[int, int] = {}
    parts: list[Hashable] = []
    for module in compat.modules_of(layer):
        if compat.has_hooks(module):
            return None
        children = tuple(
            (name, seen.setdefault(id(child), len(seen))) for name, child in module.named_children()
        )
        tensors = tuple(
            (name, _looks(tensor, seen))
            for holder in (compat.parameters_of(module), compat.buffers_of(module))
            for name, tensor in holder.items()
        )
        own = {name: value for name, value in vars(module).items() if name not in _OWN}
        try:
            rest = tuple((name, _attribute(value)) for name, value in own.items())
        except TypeError:
            return None
        parts.append((type(module), module.training, children, tensors, rest))
    return tuple(parts)


def _looks(tensor: torch.Tensor | None, seen: dict[int, int]) -> Hashable:
    if tensor is None:
        return None
    which = seen.setdefault(id(tensor), len(seen))
    looks = (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return which, looks, tensor.requires_grad


def _attribute(value: Any) -> Hashable:
    """Equal for attributes that are equal.

    Raises:
        TypeError: that cannot be told.
    """
    if type(value) is int:
        return int
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(map(_attribute, value))
    if type(value) is dict:
        return dict, tuple((_attribute(k), _attribute(item)) for k, item in value.items())
    if isinstance(value, (nn.Module, torch.Tensor)):
        raise TypeError(f"{type(value).__name__} as an attribute")
    try:
        return constant_key(value)
    except TypeError:
        return type(value), id(value)


@contextlib.contextmanager
def as_regions(groups: Sequence[Sequence[nn.Module]]) -> Iterator[None]:
    """For its duration, a call of one of these layers is a compile region."""
    layers = [layer for group in groups for layer in group]
    try:
        for group in groups:
            forward = _region_of(type(group[0]).forward)
            for layer in group:
                vars(layer)["forward"] = types.MethodType(forward, layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _region_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is a region, where what it takes is tensors and plain constants."""

    def body(self: nn.Module, spec: str, *leaves: Any) -> Any:
        args, kwargs = _put_together(spec.split(","), list(leaves))
        return forward(self, *args, **kwargs)

    region = compat.as_region(body)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        constants: list[Any] = []
        spec = [_MODE, str(torch.is_grad_enabled()), str(torch.is_autocast_enabled())]
        if not _take_apart((args, kwargs), spec, tensors, constants):
            return forward(self, *args, **kwargs)
        return region(self, ",".join(spec), *tensors, *constants)

    return call


_MODE = "mode"


def _take_apart(values: Any, spec: list[str], tensors: list[Any], constants: list[Any]) -> bool:
    """Write how values are made of tensors, each once, and of constants; False where they are made
    of something else too. Dynamo traces this, for each layer: it calls as little as can be."""
    for value in values:
        if value is None:
            spec.append("c")
            constants.append(None)
        elif isinstance(value, torch.Tensor):
            place = 0
            for other in tensors:
                if other is value:
                    break
                place += 1
            if place == len(tensors):
                tensors.append(value)
            spec.append(f"t{place}")
        elif type(value) in (bool, int, float, str):
            spec.append("c" + type(value).__name__)
            constants.append(value)
        elif type(value) is tuple or type(value) is list:
            spec.append("(" if type(value) is tuple else "[")
            if not _take_apart(value, spec, tensors, constants):
                return False
            spec.append(")")
        elif type(value) is dict:
            for name in value:
                if type(name) is not str:
                    return False
            spec.append("{" + "|".join(value))
            if not _take_apart(value.values(), spec, tensors, constants):
                return False
            spec.append(")")
        else:
            return False
    return True


def _put_together(spec: list[str], leaves: list[Any]) -> tuple[Any, Any]:
    """Puts together again what `_take_apart` took apart. Dynamo traces this."""
    tensors = [int(part[1:]) for part in spec[3:] if part[:1] == "t" and part[1:].isdigit()]
    places = [3, max(tensors) + 1 if tensors else 0]  # in the spec, among the constants
    args = _next(spec, leaves, places)
    return args, _next(spec, leaves, places)


def _next(spec: list[str], leaves: list[Any], places: list[int]) -> Any:
    part = spec[places[0]]
    places[0] += 1
    if part[0] == "t":
        return leaves[int(part[1:])]
    if part[0] == "c":
        places[1] += 1
        return leaves[places[1] - 1]
    items = []
    while spec[places[0]] != ")":
        items.append(_next(spec, leaves, places))
    places[0] += 1
    if part[0] == "{":
        return dict(zip(part[1:].split("|") if part[1:] else [], items, strict=True))
    return tuple(items) if part == "(" else items


def inlined(
    module: fx.GraphModule, args: Sequence[Any], groups: Sequence[Sequence[nn.Module]]
) -> fx.GraphModule:
    """The captured graph with the bodies of its regions in the place of their calls.

    Args:
        args: what the graph takes.
        groups: the equal layers, with the tensors that the graph takes for theirs.

    Raises:
        NotEqualError: a region did not get its own layer's tensors, where the first one got its.
    """
    writer = _Inliner(module, args, groups)
    graph = fx.Graph()
    graph.output(writer.copy(module, graph, None, "", {}))
    return compat.graph_module(module, graph)


def stand_ins(module: fx.GraphModule) -> Any:
    """The results of a captured graph, as new tensors: nothing of it is run again.

    Raises:
        NotEqualError: it returns what Dynamo has no example of.
    """

    def like(node: fx.Node) -> Any:
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            raise NotEqualError(f"{node} is returned, and no tensor")
        return TensorMeta.of(example).empty()

    return fx.map_arg(module.graph.output_node().args[0], like)


class _Inliner:
    """Copies a graph and the bodies of its regions."""

    def __init__(
        self, module: fx.GraphModule, args: Sequence[Any], groups: Sequence[Sequence[nn.Module]]
    ) -> None:
        self.module = module
        self.layers = {id(layer): layer for group in groups for layer in group}
        self.owner: dict[int, tuple[int, int]] = {}  # id of a tensor -> layer, place in it
        for key, layer in self.layers.items():
            self.owner |= {id(owned): (key, k) for k, owned in enumerate(_owned(layer))}
        placeholders = module.graph.find_nodes(op="placeholder")
        self.given = {n: id(arg) for n, arg in zip(placeholders, args, strict=True)}
        self.first: dict[str, tuple[int, tuple[int | None, ...]]] = {}  # body -> layer, its tensors

    def copy(
        self,
        body: fx.GraphModule,
        graph: fx.Graph,
        inputs: Sequence[Any] | None,
        path: str,
        moved: Mapping[int, int],
    ) -> Any:
        """Copy a body's nodes, with `inputs` for its placeholders; returns its output.

        Args:
            moved: the modules of the layer that was traced -> those of the one that it stands for.
        """
        env: dict[fx.Node, Any] = {}
        given = iter(inputs or ())
        for node in body.graph.nodes:
            source: Any = node.args[0] if node.args else None
            if node.op == "output":
                return fx.map_arg(source, env.__getitem__)
            if node.op == "placeholder" and inputs is not None:
                env[node] = next(given)
            elif node.target is compat.INVOKE and inputs is None:
                env[node] = self._region(body, graph, node, env)
            elif isinstance(env.get(source), tuple) and len(node.args) == 2:  # an item of a region
                env[node] = env[source][node.args[1]]
            elif node.op != "get_attr" or not self._is_body(node):
                env[node] = compat.copy_node(graph, node, env.__getitem__)
                if inputs is not None:
                    env[node].meta = compat.with_module_stack(node.meta, moved)
                if node.op == "get_attr":
                    env[node].target = f"{path}{node.target}"
        raise AssertionError("no output")

    def _is_body(self, node: fx.Node) -> bool:
        return all(user.target is compat.INVOKE for user in node.users)

    def _region(
        self, module: fx.GraphModule, graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]
    ) -> Any:
        name = str(node.args[0].target)  # type: ignore[union-attr]
        ran_in = [key for key, _ in compat.module_calls(node) if key in self.layers]
        taken = node.args[2:]
        given = [self.given.get(arg) for arg in taken]
        owners = [None if each is None else self.owner.get(each) for each in given]
        if len(ran_in) != 1 or {owner[0] for owner in owners if owner} - set(ran_in):
            raise NotEqualError(f"{node} takes tensors of other layers")
        places = tuple(owner[1] if owner else None for owner in owners)
        traced, first = self.first.setdefault(name, (ran_in[0], places))
        if first != places:
            raise NotEqualError(f"{node} takes other tensors of its layer than the first one")
        pairs = zip(self.layers[traced].modules(), self.layers[ran_in[0]].modules(), strict=True)
        moved = {id(old): id(new) for old, new in pairs}
        args = [env[arg] if isinstance(arg, fx.Node) else arg for arg in taken]
        return self.copy(compat.body_of(module, node), graph, args, f"{name}.", moved)
