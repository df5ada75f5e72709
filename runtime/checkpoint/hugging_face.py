"""Metadata of transformers models, and the conversion of their checkpoints' names and tensors.

The metadata are attributes of the models; reading them does not import transformers.

transformers 5 describes for each model how a checkpoint's tensors are converted to the model's
(`WeightRenaming`, `WeightConverter`): it renames tensors and merges experts. Its code does the
conversions in both directions. A renamed tensor is read directly into place; tensors that are
computed from several are computed one group at a time.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_FLAG = "_is_hf_initialized"  # marks tensors and modules that transformers does not initialize


def pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost `PreTrainedModel`s in a model, with their names."""
    inside = ""
    for name, module in model.named_modules():
        if is_pretrained(module) and not (inside and name.startswith(inside)):
            inside = f"{name}." if name else ""
            yield name, module
            if not name:
                return


def is_pretrained(module: nn.Module) -> bool:
    needed = ("_init_weights", "initialize_weights", "tie_weights", "config")
    return all(hasattr(module, name) for name in needed)


def tie(model: nn.Module) -> None:
    """Tie weights as configured: moving a model to meta unties them."""
    for _, module in pretrained(model):
        module.tie_weights()


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


def initialize(model: Any, unset: set[int]) -> None:
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
