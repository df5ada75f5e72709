"""Metadata of transformers models, and the conversion of their checkpoints' names and tensors.

The metadata are attributes of the models; reading them does not import transformers.

transformers 5 describes for each model how a checkpoint's tensors are converted to the model's
(`WeightRenaming`, `WeightConverter`): it renames tensors and merges experts. Its code does the
conversions in both directions. A renamed tensor is read directly into place; tensors that are
computed from several are computed one group at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import CheckpointError

_FLAG = "_is_hf_initialized"  # marks tensors and modules that transformers does not initialise


def pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost `PreTrainedModel`s in a model, with their names."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        if is_pretrained(module):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return visit("", model)


def is_pretrained(module: nn.Module) -> bool:
    """True if a module is a `PreTrainedModel`."""
    needed = ("_init_weights", "initialize_weights", "tie_weights", "config")
    return all(hasattr(module, name) for name in needed)


def tie(model: nn.Module) -> None:
    """Tie weights as configured: moving a model to meta unties them."""
    for _, module in pretrained(model):
        module.tie_weights()


def left_out(model: nn.Module, names: Iterable[str], attribute: str) -> set[str]:
    """The names that match the ignore patterns of a model's class.

    Args:
        model: of any class.
        names: of a checkpoint's tensors.
        attribute: `_keys_to_ignore_on_load_missing`, `_keys_to_ignore_on_load_unexpected` or
            `_keys_to_ignore_on_save`: regular expressions.
    """
    patterns: set[str] = set()
    for _, module in pretrained(model):
        patterns.update(getattr(module, attribute, None) or ())
        if attribute == "_keys_to_ignore_on_load_unexpected":  # transformers adds these
            buffers = {name.rpartition(".")[2] for name, _ in module.named_buffers()}
            patterns.update({r"rotary_emb\.inv_freq"} if "inv_freq" in buffers else ())
            patterns.update({r"(^|\.)position_ids$"} if "position_ids" in buffers else ())
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def initialize(model: Any, unset: set[int]) -> None:
    """Initialise tensors of a `PreTrainedModel` by its `_init_weights`; all others keep their
    values.

    Args:
        model: without tensors on meta.
        unset: ids of the parameters and buffers to initialise.
    """
    flagged: list[torch.Tensor] = []
    for module in model.modules():
        tensors = [*module.parameters(), *module.buffers()]
        setattr(module, _FLAG, not any(id(tensor) in unset for tensor in tensors))
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in own:
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
    _patterns: tuple[str, ...]  # the pattern that each source matched
    _path: str  # of transformers' model within the user's
    _model: Any
    _converter: Any

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the targets from the sources."""
        first = self.targets[0].removeprefix(self._path)
        converter = copy.deepcopy(self._converter)
        for source, pattern in zip(self.sources, self._patterns, strict=True):
            converter.add_tensor(first, source, pattern, tensors[source])
        converted = converter.convert(first, model=self._model, config=self._model.config)
        return {
            f"{self._path}{name}": value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversions of a checkpoint's names."""

    renamed: dict[str, str]  # the model's name -> the checkpoint's
    groups: tuple[Group, ...]


def conversion(model: nn.Module, checkpoint: Iterable[str]) -> Conversion | None:
    """The conversion that transformers applies when it loads a checkpoint into a model; None if it
    has none.

    Args:
        model: a transformers model, or a wrapper around one.
        checkpoint: the checkpoint's names.
    """
    inner_models = list(pretrained(model))
    if len(inner_models) != 1:
        return None
    try:
        from transformers import core_model_loading as loading  # since 5.0
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    path = f"{inner_models[0][0]}." if inner_models[0][0] else ""
    inner: Any = inner_models[0][1]
    state = inner.state_dict()
    transforms = get_model_conversion_mapping(inner)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    renamed: dict[str, str] = {}
    members: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(checkpoint, key=loading.dot_natural_key):
        given = (inner.base_model_prefix, state)
        target, pattern = loading.rename_source_key(name, renamings, converters, *given)
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], *given)
        if pattern is None:
            renamed[f"{path}{target}"] = name
        else:
            members.setdefault(target, []).append((name, pattern))
    groups = []
    for target, sources in members.items():
        names, patterns = zip(*sources, strict=True)
        converter = by_pattern[patterns[0]]
        first = converter.target_patterns[0]
        targets = [target.replace(first, each) for each in converter.target_patterns]
        groups.append(
            Group(
                tuple(f"{path}{each}" for each in targets),
                names,
                patterns,
                path,
                inner,
                converter,
            )
        )
    return Conversion(renamed, tuple(groups))


class Saved:
    """A model's tensors in the form of its checkpoints, computed on demand.

    Converted tensors (such as experts that the model merges) are computed from one tensor of the
    model at a time if possible, otherwise from all of them at once.

    Args:
        model: models that are not transformers' need no conversion.
        tensors: by their names in the model.
        whole: gathers a sharded tensor; returns any other tensor unchanged.

    Raises:
        CheckpointError: the parameters are sharded, and all would have to be gathered at once.
    """

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, torch.Tensor],
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._whole = whole
        self._source: dict[str, str] = {}  # checkpoint name -> the model's, of converted tensors
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.looks = dict(tensors)  # the checkpoint's tensors; on meta if they are computed
        if not is_pretrained(model):
            return
        metas = {name: _meta(tensor) for name, tensor in tensors.items()}
        at_once = _reverted(model, metas)
        if all(made is metas.get(name) for name, made in at_once.items()):
            return
        self.looks = {}
        for name, meta in metas.items():
            made = {name: meta} if at_once.get(name) is meta else _reverted(model, {name: meta})
            for new, look in made.items():
                self._source[new] = name
                self.looks[new] = tensors[name] if look is meta else look
        if not _alike(self.looks, at_once):  # some are computed from several
            if any(map(compat.is_sharded, tensors.values())):
                raise CheckpointError(
                    f"save(): checkpoints of {type(model).__name__} have tensors that are computed "
                    "from several parameters, and ranks that share it (mesh=) gather one at a "
                    "time; save with torch.distributed.checkpoint"
                )
            self._source, self._tensors = {}, _reverted(model, dict(tensors))
            self.looks = dict(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint. `looks` lists those from one tensor of the model
        consecutively, so they are computed once."""
        source = self._source.get(name) if self.looks[name].is_meta else None
        if self._last[0] != source:
            self._last = ("", {})  # free its memory before the next conversion
        if source is None:
            return self._whole(self.looks[name])
        if not self._last[0]:
            gathered = {source: self._whole(self._tensors[source])}
            self._last = (source, _reverted(self._model, gathered))
        return self._last[1][name]


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion  # since 5.0
    except ImportError:
        return tensors
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return reverted


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _alike(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(a[n].shape == b[n].shape and a[n].dtype == b[n].dtype for n in a)
