"""The facts that transformers' models say of themselves, and its names of their tensors in files.

The facts are attributes: nothing of transformers is imported for them.

transformers 5 keeps, for each of its models, how the tensors of a checkpoint become those of the
model (`WeightRenaming`, `WeightConverter`): other names, experts that it merges. Both directions
are its code; here it is only asked, so that a tensor that is merely renamed can be read straight to
its place, and one that is computed from several is computed for one group of them at a time.
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

_FLAG = "_is_hf_initialized"  # of tensors and modules that transformers' initialisation leaves out


def pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost `PreTrainedModel`s in a model, and their names."""

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
    """Tie what the configs tie: a model that was moved to meta has lost it."""
    for _, module in pretrained(model):
        module.tie_weights()


def left_out(model: nn.Module, names: Iterable[str], attribute: str) -> set[str]:
    """The names that a model's class says may be missing from a checkpoint, or too many in one.

    Args:
        model: of any class.
        names: of tensors of a checkpoint.
        attribute: `_keys_to_ignore_on_load_missing`, `_keys_to_ignore_on_load_unexpected` or
            `_keys_to_ignore_on_save`: regular expressions.
    """
    patterns: set[str] = set()
    for _, module in pretrained(model):
        patterns.update(getattr(module, attribute, None) or ())
        if attribute == "_keys_to_ignore_on_load_unexpected":  # as transformers adds
            buffers = {name.rpartition(".")[2] for name, _ in module.named_buffers()}
            patterns.update({r"rotary_emb\.inv_freq"} if "inv_freq" in buffers else ())
            patterns.update({r"(^|\.)position_ids$"} if "position_ids" in buffers else ())
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def initialize(model: Any, unset: set[int]) -> None:
    """Initialise tensors of a `PreTrainedModel` by its own `_init_weights`, and no others.

    Args:
        model: all of it in memory.
        unset: ids of parameters and buffers.
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


# Names of a checkpoint that transformers converts.


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of a model that are computed from tensors of a checkpoint."""

    targets: tuple[str, ...]  # names in the model
    sources: tuple[str, ...]  # names in the checkpoint
    _patterns: tuple[str, ...]  # of each source, that it was found by
    _path: str  # of the model of transformers in the user's
    _model: Any
    _converter: Any

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The targets, from the sources."""
        first = self.targets[0].removeprefix(self._path)
        converter = copy.deepcopy(self._converter)
        for source, pattern in zip(self.sources, self._patterns, strict=True):
            converter.add_tensor(first, source, pattern, tensors[source])
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {
            f"{self._path}{name}": value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversions of a checkpoint's names."""

    renamed: dict[str, str]  # the model's name -> the checkpoint's
    groups: tuple[Group, ...]


def conversion(model: nn.Module, checkpoint: Iterable[str]) -> Conversion | None:
    """The way transformers would read a checkpoint into a model; None where it does not know.

    Args:
        model: of transformers, or a wrapper around one.
        checkpoint: the names there.
    """
    found = list(pretrained(model))
    if len(found) != 1:
        return None
    try:
        from transformers import core_model_loading as loading  # since 5.0
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    path = f"{found[0][0]}." if found[0][0] else ""
    inner: Any = found[0][1]
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
    """A model's tensors as its checkpoints have them, made when they are asked for.

    Those that are computed (experts apart) are computed of one tensor of the model at a time, where
    that can be, and of all of them at once where it cannot.

    Args:
        model: of transformers; of any other, names are right as they are.
        tensors: by their names in the model.
        whole: returns all of a tensor of which ranks have parts; any other one as it is.

    Raises:
        CheckpointError: ranks share them, and all would have to be whole at once.
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
        self._source: dict[str, str] = {}  # of what is computed: its name in the model
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.looks = dict(tensors)  # what is saved, by its name there; on meta where it is computed
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
        if not _alike(self.looks, at_once):  # some are made of several
            if any(map(compat.is_sharded, tensors.values())):
                raise CheckpointError(
                    f"save(): checkpoints of {type(model).__name__} have tensors that are computed "
                    "from several parameters, and ranks that share it (mesh=) gather one at a "
                    "time; save with torch.distributed.checkpoint"
                )
            self._source, self._tensors = {}, _reverted(model, dict(tensors))
            self.looks = dict(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        """One tensor. What comes of one tensor of the model follows one another in `looks`."""
        source = self._source.get(name) if self.looks[name].is_meta else None
        if self._last[0] != source:
            self._last = ("", {})  # its memory, before there is more
        if source is None:
            return self._whole(self.looks[name])
        if not self._last[0]:
            there = {source: self._whole(self._tensors[source])}
            self._last = (source, _reverted(self._model, there))
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
