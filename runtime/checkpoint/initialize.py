"""Random initialization of a model on meta; metadata of transformers models, and the conversion of
their checkpoints' names and tensors.

Initialization calls its modules' own methods:

    transformers        `initialize_weights()`: calls each module's `_init_weights`
    torch, user code    `reset_parameters()` or `_reset_parameters()`, children first
    torchtitan, others  `init_weights()` without arguments, of the outermost module that has it

Numbers are drawn from the CPU's generator in this order, on every device. So they are bitwise those
of `model.to_empty(device="cpu")` followed by the same calls. A model built on the CPU has the same
numbers if its constructors draw no others; the constructors of torch's modules do not.

transformers 5 describes how a checkpoint's tensors are converted to a model's (`WeightRenaming`,
`WeightConverter`). Its code does the conversions in both directions. A renamed tensor is read
directly into place; tensors that are computed from several are computed one group at a time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError

_FLAG = "_is_hf_initialized"  # marks tensors and modules that transformers does not initialize


def pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost `PreTrainedModel`s in a model, with their names."""
    inside: tuple[str, ...] = ()  # the prefix of the names in the last one
    for name, module in model.named_modules():
        if not name.startswith(inside) and is_pretrained(module):
            inside = (f"{name}." if name else "",)
            yield name, module


def is_pretrained(module: nn.Module) -> bool:
    needed = ("_init_weights", "initialize_weights", "tie_weights", "config")
    return all(hasattr(module, name) for name in needed)


def left_in(model: nn.Module, names: Iterable[str], attribute: str) -> list[str]:
    """The names of a checkpoint's tensors that match no regular expression of a model's
    `attribute`, such as `_keys_to_ignore_on_save`."""
    patterns: set[str] = set()
    for _, module in pretrained(model):
        patterns.update(getattr(module, attribute, None) or ())
        if attribute == "_keys_to_ignore_on_load_unexpected":  # transformers adds these
            buffers = {name.rpartition(".")[2] for name, _ in module.named_buffers()}
            patterns.update({r"rotary_emb\.inv_freq"} if "inv_freq" in buffers else ())
            patterns.update({r"(^|\.)position_ids$"} if "position_ids" in buffers else ())
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def initialize_pretrained(model: Any, unset: set[int]) -> None:
    """Initialize parameters and buffers with these ids of a `PreTrainedModel` by its
    `_init_weights`; all others keep their values. None may be on meta."""
    flagged: list[torch.Tensor] = []
    for module in model.modules():
        tensors = [*module.parameters(), *module.buffers()]
        setattr(module, _FLAG, not any(id(tensor) in unset for tensor in tensors))
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in unset:
            tensor.__dict__.pop(_FLAG, None)
        elif not getattr(tensor, _FLAG, False):
            setattr(tensor, _FLAG, True)
            flagged.append(tensor)
    try:
        model.initialize_weights()
    finally:
        for tensor in flagged:
            tensor.__dict__.pop(_FLAG, None)


# Conversion of checkpoints by transformers.


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of a model that transformers computes from a checkpoint's tensors."""

    targets: tuple[str, ...]  # names in the model
    sources: tuple[str, ...]  # names in the checkpoint
    convert: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]  # sources to targets


def conversion(
    model: nn.Module, checkpoint: Iterable[str]
) -> tuple[dict[str, str], tuple[Group, ...]]:
    """The conversion that transformers applies when it loads a checkpoint with these names into a
    model, or into a wrapper's: the renamed tensors (the model's name -> the checkpoint's), and the
    computed ones."""
    inner_models = list(pretrained(model))
    if len(inner_models) != 1:
        return {}, ()
    try:
        from transformers import core_model_loading as loading  # since 5.0
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return {}, ()
    path = f"{inner_models[0][0]}." if inner_models[0][0] else ""
    inner: Any = inner_models[0][1]
    state = inner.state_dict()
    transforms = get_model_conversion_mapping(inner)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    renamed: dict[str, str] = {}
    members: dict[str, dict[str, str]] = {}  # target -> source -> the pattern that it matched
    for name in sorted(checkpoint, key=loading.dot_natural_key):
        given = (inner.base_model_prefix, state)
        target, pattern = loading.rename_source_key(name, renamings, converters, *given)
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], *given)
        if pattern is None:
            renamed[f"{path}{target}"] = name
        else:
            members.setdefault(target, {})[name] = pattern
    groups = []
    for target, patterns in members.items():
        converter = by_pattern[next(iter(patterns.values()))]
        first = converter.target_patterns[0]
        targets = [target.replace(first, each) for each in converter.target_patterns]
        convert = functools.partial(_converted, inner, path, converter, targets[0], patterns)
        groups.append(Group(tuple(path + each for each in targets), tuple(patterns), convert))
    return renamed, tuple(groups)


def _converted(
    model: Any,
    path: str,  # of the model within the user's
    converter: Any,
    first: str,  # of its targets
    patterns: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    converter = copy.deepcopy(converter)
    for source, pattern in patterns.items():
        converter.add_tensor(first, source, pattern, tensors[source])
    converted = converter.convert(first, model=model, config=model.config)
    return {
        f"{path}{name}": value[0] if isinstance(value, list) else value
        for name, value in converted.items()
    }


def reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that transformers computes from a model's."""
    try:
        from transformers.core_model_loading import revert_weight_conversion  # since 5.0
    except ImportError:
        return tensors
    made: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return made


# Random initialization.

_BYTE = 0xFF  # floating-point numbers of these bytes are NaN with a payload that no code computes
_CHUNK = 2**24  # elements checked at a time
_RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats")  # by torch's convention


def initialize(model: nn.Module, unset: Mapping[str, torch.Tensor]) -> None:
    """Initialize parameters and buffers, by name, none of which is on meta. Others may change, too.
    Raises ModelError: a tensor was not written completely."""
    for tensor in unset.values():
        _flat(tensor).view(torch.uint8).fill_(_BYTE)
    with torch.no_grad():
        _visit(model, {id(tensor) for tensor in unset.values()}, rooted=False)
        now = {name: _take_back(model, name, tensor) for name, tensor in unset.items()}
    missing = [name for name, tensor in now.items() if tensor.is_meta or _is_unset(tensor)]
    if missing:
        raise ModelError(
            f"megacompile(): {len(missing)} tensors of {type(model).__name__} were on meta and get "
            f"no values: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; needed a "
            "checkpoint that has them (checkpoint=), or code that initializes them; give its "
            "module a reset_parameters() that writes all of it; or build it in memory (with "
            "torch.device('cpu'):) before megacompile()"
        )


def _take_back(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that now has this name. A parameter that initialization replaced is restored, with
    the new values."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(tensor, nn.Parameter):
        now: torch.Tensor = getattr(module, own)
        return now
    replacement = compat.parameters_of(module)[own]
    if replacement is not tensor and replacement is not None:
        tensor.copy_(replacement)
        compat.parameters_of(module)[own] = tensor
    return tensor


def _visit(module: nn.Module, unset: set[int], *, rooted: bool) -> None:
    """Initialize a module, children first, like constructors."""
    inside = [*module.parameters(), *module.buffers()]
    if not any(id(tensor) in unset for tensor in inside):
        return
    if is_pretrained(module):
        initialize_pretrained(module, unset)
        return
    root = None if rooted else _method(module, "init_weights")
    for child in module.children():
        _visit(child, unset, rooted=rooted or root is not None)
    if (reset := _method(module, *_RESETS)) is not None:
        reset()
    if root is not None:
        root()


def _method(module: nn.Module, *names: str) -> Callable[[], object] | None:
    """The first of these methods that a module has and that needs no arguments."""
    methods = (getattr(module, name, None) for name in names)
    return next((each for each in methods if callable(each) and _takes_nothing(each)), None)


def _takes_nothing(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def refuse_stray(model: nn.Module) -> None:
    """Raise for tensors on meta that are neither parameters nor buffers: nothing initializes them.
    Raises ModelError: names the tensor."""
    for name, module in model.named_modules():
        kept = {id(t) for t in (*module.parameters(False), *module.buffers(False))}
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in kept:
                where = f"{name}.{attribute}" if name else attribute
                raise ModelError(
                    f"megacompile(): {type(model).__name__}.{where} is a tensor on meta, and "
                    "neither a parameter nor a buffer, so it cannot be initialized; needed one in "
                    "memory: create it with device='cpu'"
                )


# Memory for tensors on meta.
#
# Parameter objects stay the same, because an optimizer may have them already.


def give_memory(param: nn.Parameter, value: torch.Tensor) -> Callable[[], None]:
    """Set a parameter's memory to that of `value`; returns a function that undoes this."""
    if param.is_meta:  # `param.data = value` cannot change the device from meta
        # `value.data` has a separate version counter
        twin = nn.Parameter(value.data, requires_grad=param.requires_grad)
        compat.exchange_memory(param, twin)
        return functools.partial(compat.exchange_memory, param, twin)
    before = compat.local(param).data
    compat.set_local(param, value)
    return functools.partial(compat.set_local, param, before)


def _is_unset(tensor: torch.Tensor) -> bool:
    """True if some element still has bytes of `_BYTE`; for integers, for which -1 is a valid value,
    only if all have."""
    flat = _flat(tensor)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    marked = (chunk == -1 for chunk in flat.view(whole).split(_CHUNK))
    if flat.dtype.is_floating_point or flat.dtype == torch.bool:
        return any(bool(chunk.any()) for chunk in marked)
    return flat.numel() > 0 and all(bool(chunk.all()) for chunk in marked)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order: (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
