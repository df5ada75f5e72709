"""Builds the model that a command plans for, on `meta`, from a config or a function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.cli import source
from megacompile.cli.source import Config, Function
from megacompile.errors import OptionError


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its inputs."""

    name: str
    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tokens: int | None  # per step; None: unknown
    shape: str  # description of the batch
    note: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())


class LossAlone(nn.Module):
    """A causal language model that returns its loss and no logits, so that its head can run in
    chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq) int64
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def build(
    text: str, *, batch: int, seq: int, dtype: torch.dtype | None, float8: str | None = None
) -> Target:
    """Build the model of a target.

    Args:
        text: a folder with a config.json, a json file, or `package.module:function`.
        batch, seq: shape of the token ids; a function may take them as arguments.
        dtype: of floating-point parameters. None: bfloat16 for a config, unchanged for a function.
        float8: torchao's recipe for the linear layers of a config.

    Raises:
        OptionError: no such target, or it returns no model.
    """
    named = source.parse(text)
    if isinstance(named, Config):
        return _of_config(named, batch, seq, dtype or torch.bfloat16, float8)
    return _of_function(text, named, batch, seq, dtype)


def _of_config(
    named: Config, batch: int, seq: int, dtype: torch.dtype, float8: str | None
) -> Target:
    file, kind = named.file, named.model_type
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__

    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=3, cutoff=0.0)
        raise OptionError(
            f"{file}: transformers {__version__} has no model_type {kind!r}; nearest: "
            f"{', '.join(near)}"
        )
    try:
        config = AutoConfig.for_model(kind, **named.values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # depends on the config's values
        raise OptionError(f"{file}: transformers: {type(error).__name__}: {error}") from None
    source.check_length(seq, getattr(config, "max_position_embeddings", None))
    _cast(model, dtype)
    if float8 is not None:
        _to_float8(model, float8)
    note = "the model returns its loss and no logits, so that its head can run in chunks"
    return _of_tokens(f"{type(model).__name__} of {file}", LossAlone(model), batch, seq, note)


def _of_tokens(name: str, model: nn.Module, batch: int, seq: int, note: str) -> Target:
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    return Target(name, model, (tokens,), {}, batch * seq, f"{batch} x {seq} tokens", note)


def _of_function(
    text: str, named: Function, batch: int, seq: int, dtype: torch.dtype | None
) -> Target:
    make = source.function(text, named)
    sizes = {"batch": batch, "seq": seq}
    known = inspect.signature(make).parameters
    try:
        with torch.device("meta"):
            made = make(**{name: size for name, size in sizes.items() if name in known})
    except Exception as error:  # the user's code
        raise OptionError(f"{text}: {source.first_line(error)}") from None
    parts = made if isinstance(made, tuple) else (made,)
    model = parts[0]
    if not isinstance(model, nn.Module) or len(parts) > 3:
        raise OptionError(
            f"{text}: got {type(made).__name__}; needed a torch.nn.Module or (module, args, kwargs)"
        )
    if dtype is not None:
        _cast(model, dtype)
    if len(parts) == 1:
        return _of_tokens(text, model, batch, seq, "it gets token ids")
    _, args, kwargs = (*parts, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise OptionError(f"{text}: needed (module, args, kwargs): a module, a tuple and a dict")
    if set(sizes) <= set(known):
        return Target(text, model, args, kwargs, batch * seq, f"{batch} x {seq} tokens")
    return Target(text, model, args, kwargs, None, "the function's inputs")


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as rotary frequencies keep their dtype."""
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)


def _to_float8(model: nn.Module, recipe: str) -> None:
    """Convert linear layers to torchao's float8 training, except the head and widths that are not
    multiples of 16."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head = model.get_output_embeddings()  # type: ignore[operator]

    def wanted(module: nn.Linear, name: str) -> bool:
        del name
        return module is not head and module.in_features % 16 == module.out_features % 16 == 0

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=wanted)
