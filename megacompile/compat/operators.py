"""Schemas, tags and settings of operators; operators without a public name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._library.utils import lookup_op
from torch.utils import _pytree

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")


def define_operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None,
    key: str = "CompositeExplicitAutograd",
    *,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define an operator of ours, which is returned, by its schema and its kernel for a dispatch
    key. `fake` returns results without data; None if tracing decomposes the kernel."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, kernel, key)
    if fake is not None:
        torch.library.register_fake(f"megacompile::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.megacompile, name).default


def operator_name(target: Any) -> str:
    """An ATen operator's name without its namespace and overload; "" for other targets."""
    return str(getattr(target, "_opname", ""))


def is_higher_order(target: Any) -> bool:
    """True for an operator with graphs as arguments: a loop, flex attention."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def kernel_of(target: Any) -> Any:
    """The C++ function of an ATen operator, without its Python wrapper; other targets unchanged."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def arguments_of(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """(name, value) of an ATen node's arguments, defaults included; nothing for other nodes."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(() if schema is None else schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        yield argument.name, argument.default_value if given is None else given


def is_random(node: fx.Node) -> bool:
    """True if an ATen node draws random numbers. Attention with `dropout_p=0` does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(dict(arguments_of(node)).get("dropout_p", True))


def is_mutable(func: Any) -> bool:
    """True if an ATen operator changes an argument in place."""
    return bool(func._schema.is_mutable)


# Functions that change an argument in place without changing its version.
COUNT_NO_VERSION = (torch.nn.functional.batch_norm, torch.batch_norm)

# Calls in captured graphs that change how torch decomposes the operators after them.
CHOOSES_KERNELS = (torch.nn.attention._sdpa_kernel, torch._C._set_deterministic_algorithms)

_C: Any = torch._C  # its stubs leave these out
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


def kernel_switches() -> tuple[Any, ...]:
    """Process-wide settings that decide how torch decomposes operators: attention, batch norm,
    recurrent layers."""
    values = (get() for get, _ in _SWITCHES)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def set_kernel_switches(wanted: Sequence[Any]) -> None:
    """Restore settings that `kernel_switches` returned."""
    for (_, put), value, now in zip(_SWITCHES, wanted, kernel_switches(), strict=True):
        if value != now:
            put(value)


# Apply `function` to every leaf of nested containers, registered classes included.
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _pytree.tree_map


def map_values(function: Callable[[Any], Any], func: Any, values: Any) -> Any:
    """`tree_map` over an operator's arguments or results; those of ATen operators, lists, tuples
    and dicts, take a tenth of the time."""
    if isinstance(func, torch._ops.OpOverload):
        return _mapped(function, values)
    return tree_map(function, values)


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([_mapped(function, value) for value in values])
    if kind is dict:
        return {name: _mapped(function, value) for name, value in values.items()}
    if isinstance(values, (tuple, list, dict)):
        return tree_map(function, values)
    return function(values)


def tree_map_once(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the items of a container, nested containers included."""
    return _pytree.tree_map(function, tree, is_leaf=lambda each: each is not tree)


# The leaves of nested containers.
leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves


@functools.cache
def returns_views(func: Any) -> bool:
    """True if an ATen operator returns a view of its input, without changing it."""
    schema = getattr(func, "_schema", None)
    aliases = [] if schema is None else [result.alias_info for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an ATen operator changes in place."""
    given = {
        argument.name: kwargs[argument.name] if argument.name in kwargs else args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in kwargs or i < len(args))
    }
    return _pytree.tree_leaves(list(given.values()))


def call_with(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    kind: type,
    plain: Callable[[Any], torch.Tensor],
    store: Callable[[Any, torch.Tensor], None],
) -> Any:
    """Call an ATen operator with `plain(tensor)` for each tensor of a class, once. Tensors that it
    changes in place get their new values by `store`, and are returned themselves."""
    plains: dict[int, tuple[Any, torch.Tensor]] = {}

    def replaced(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        if id(value) not in plains:
            plains[id(value)] = value, plain(value)
        return plains[id(value)][1]

    given, named = map_values(replaced, func, (args, kwargs))
    result = func(*given, **named)
    if is_mutable(func):
        for value in written(func, args, kwargs):
            if isinstance(value, kind):
                store(value, plains[id(value)][1])
        back = {id(values): tensor for tensor, values in plains.values()}
        result = tree_map(lambda value: back.get(id(value), value), result)
    return result


@functools.cache
def taking_tensors(target: Any, names: tuple[str, ...]) -> Any:
    """An operator equal to an ATen operator, but with one-element tensors for the numbers `names`;
    None if there can be none. It takes the operator's arguments, all by position."""
    schema = getattr(target, "_schema", None)
    if schema is None or any(item.alias_info for item in (*schema.arguments, *schema.returns)):
        return None
    _, text = str(schema).split("(", 1)
    text = _DEFAULT.sub("", text).replace("*, ", "")
    for name in names:
        text, found = re.subn(rf"\b(Scalar|float|Tensor)\??( {name}[,)])", r"Tensor\2", text)
        if not found:
            return None
    own = re.sub(r"\W+", "_", f"{target}_of_{'_and_'.join(names)}")
    items = [(item.name, item.name in names, item.kwarg_only) for item in schema.arguments]

    def run(number: Callable[[Any], Any], *given: Any) -> Any:
        values = [number(v) if k else v for v, (_, k, _) in zip(given, items, strict=True)]
        named = {name: v for v, (name, _, k) in zip(values, items, strict=True) if k}
        return target(*values[: len(values) - len(named)], **named)

    fake = functools.partial(run, lambda tensor: _LIKE[tensor.dtype])  # no shape depends on it
    tags = {torch.Tag.nondeterministic_seeded}.intersection(target.tags)
    made = define_operator(
        f"{own}({text}", functools.partial(run, torch.Tensor.item), fake, tags=[*tags]
    )
    _TAKING[made] = target, names
    return made


def taken_tensors(graph: fx.Graph) -> list[tuple[str, tuple[str, ...]]]:
    """The arguments that `define_taking` needs in another process for this graph's operators."""
    found = [_TAKING[node.target] for node in graph.nodes if node.target in _TAKING]
    return [(target.name(), names) for target, names in dict.fromkeys(found)]


def define_taking(name: str, names: tuple[str, ...]) -> None:
    """Define `taking_tensors` of the operator with this qualified name."""
    taking_tensors(lookup_op(name), names)


_TAKING: dict[Any, tuple[Any, tuple[str, ...]]] = {}  # operator -> its `taking_tensors`
_LIKE = {torch.float64: 0.5, torch.int64: 1, torch.bool: True}
_DEFAULT = re.compile(r"=(\[[^]]*\]|[^,)]+)")


def _cudnn_batch_norm(x: Any, weight: Any, bias: Any, *others: Any) -> Any:
    *statistics, training, momentum, eps = others
    new = [statistic.clone() for statistic in statistics]
    normed = torch.ops.aten.cudnn_batch_norm.default
    return *normed(x, weight, bias, *new, training, momentum, eps), *new


# aten.cudnn_batch_norm, which changes its statistics, as an operator that returns new ones.
CUDNN_BATCH_NORM = define_operator(
    "cudnn_batch_norm(Tensor x, Tensor weight, Tensor? bias, Tensor means, Tensor variances, "
    "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cudnn_batch_norm,
    _cudnn_batch_norm,
    "CUDA",
)

# The product of fp8 matrices, each with a scale.
SCALED_MM = torch._scaled_mm

# Functions on lists of tensors.
FOREACH_NORM = torch._foreach_norm
FOREACH_COPY = torch._foreach_copy_
FOREACH_MUL = torch._foreach_mul_
FOREACH_ZERO = torch._foreach_zero_
FOREACH_ADD = torch._foreach_add_


def take_as_plain(kind: type) -> None:
    """Makes `clip_grad_norm_` call its functions on lists for tensors of this class too, instead of
    one function per tensor."""
    supported: list[Any] = torch.utils._foreach_utils._foreach_supported_types
    if kind not in supported:
        supported.append(kind)
