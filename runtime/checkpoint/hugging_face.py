"""The facts that transformers' models say of themselves, by their attributes: nothing of it is
imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

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
