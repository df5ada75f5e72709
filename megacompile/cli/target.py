"""Builds the model that `plan` is about, on `meta`, from a config or a function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import MissingExtraError, OptionError


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its inputs."""

    name: str
    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tokens: int | None  # per step; None: unknown

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


def build(text: str, *, batch: int, seq: int, dtype: torch.dtype | None) -> Target:
    """Build the model of a target.

    Args:
        text: a folder with a config.json, a json file, or `package.module:function`.
        batch, seq: shape of the token ids; a function may take them as arguments.
        dtype: of floating-point parameters. None: bfloat16 for a config, unchanged for a function.

    Raises:
        OptionError: no such target, or it returns no model.
        MissingExtraError: transformers is not installed, and a config needs it.
    """
    path = Path(text)
    module, _, function = text.partition(":")
    made: tuple[Any, ...]
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        inner = _of_config(file, seq)
        name = f"{type(inner).__name__} of {file}"
        made, takes_sizes = (LossAlone(inner),), True
        dtype = dtype or torch.bfloat16
    elif module and function:
        name = text
        made, takes_sizes = _of_function(text, module, function, {"batch": batch, "seq": seq})
    else:
        raise OptionError(
            f"{text!r} is not a folder with a config.json, a json file or package.module:function "
            "(gpt:build for a function of gpt.py that returns the model); nothing is downloaded: "
            "for a name on a hub, pass its config.json"
        )
    model = made[0]
    if dtype is not None:
        for param in model.parameters():  # buffers such as rotary frequencies keep their dtype
            if param.is_floating_point():
                param.data = param.data.to(dtype)
    if len(made) == 1:
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
        return Target(name, model, (tokens,), {}, batch * seq)
    _, args, kwargs = (*made, {})[:3]
    return Target(name, model, args, kwargs, batch * seq if takes_sizes else None)


def _of_config(file: Path, seq: int) -> nn.Module:
    if not file.is_file():
        raise OptionError(f"no such file: {str(file)!r}")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__
    except ImportError:
        raise MissingExtraError(
            "a config needs transformers: pip install transformers; "
            "package.module:function does not"
        ) from None
    try:
        given = json.loads(file.read_text())
        kind = given.pop("model_type")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OptionError(f"{file} is no JSON with a model_type; needed a config.json") from None
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=3, cutoff=0.0)
        raise OptionError(
            f"{file}: transformers {__version__} has no model_type {kind!r}; nearest: "
            f"{', '.join(near)}"
        )
    try:
        config = AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # depends on the config's values
        raise OptionError(f"{file}: transformers: {first_line(error)}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise OptionError(
            f"--seq {seq}: the config has max_position_embeddings {longest}; lower --seq"
        )
    return model


def _of_function(
    text: str, module: str, name: str, sizes: dict[str, int]
) -> tuple[tuple[Any, ...], bool]:
    """The results of the function that a target names; True if it takes all of `sizes`."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
        known = inspect.signature(function).parameters
        with torch.device("meta"):
            made = function(**{name: size for name, size in sizes.items() if name in known})
    except Exception as error:  # the user's code
        raise OptionError(f"{text}: {first_line(error)}") from None
    finally:
        sys.path.pop(0)
    parts = made if isinstance(made, tuple) else (made,)
    kinds: tuple[Any, ...] = (nn.Module, (tuple, list), dict)
    if not 1 <= len(parts) <= 3 or not all(
        isinstance(part, kind) for part, kind in zip(parts, kinds, strict=False)
    ):
        raise OptionError(
            f"{text}: got {type(made).__name__}; needed a torch.nn.Module or (module, args, kwargs)"
        )
    return parts, set(sizes) <= set(known)


def first_line(error: Exception) -> str:
    """An error of user code in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
