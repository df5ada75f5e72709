"""The model that a command plans for, on `meta`: from a config, or from a function."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import MissingExtraError, OptionError


@dataclass(frozen=True, slots=True)
class Target:
    """A model, what it is called with, and what that is."""

    name: str
    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tokens: int | None  # a step; None: not known
    shape: str  # of the batch, for people
    note: str = ""

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(p.numel() for p in self.model.parameters())


class LossAlone(nn.Module):
    """A causal language model that gives its loss and no logits: its head can be in chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq) int64
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def build(text: str, *, batch: int, seq: int, dtype: torch.dtype | None) -> Target:
    """The model that `text` names.

    Args:
        text: a folder with a config.json, a json file, or `package.module:function`.
        batch, seq: of the tokens that it gets; a function may take them as arguments.
        dtype: of its floating parameters. None: bfloat16 for a config, a function's as they are.

    Raises:
        OptionError: nothing of that name, or one that gives no model.
        MissingExtraError: transformers is not installed, and a config needs it.
    """
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path, batch, seq, dtype or torch.bfloat16)
    module, _, function = text.partition(":")
    if not function or not module:
        raise OptionError(
            f"{text!r} is no folder with a config.json, no json file, no package.module:function"
        )
    return _of_function(text, module, function, batch, seq, dtype)


def _of_config(path: Path, batch: int, seq: int, dtype: torch.dtype) -> Target:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise OptionError(f"there is no file {str(file)!r}")
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise OptionError(f"{file} is no JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise OptionError(f"{file} has no model_type, as Hugging Face's config.json has it")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingExtraError("a config needs transformers: pip install transformers") from None
    kind = given.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a config's values lead to
        raise OptionError(f"{file}: transformers: {_first_line(error)}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise OptionError(f"--seq {seq}: the config has max_position_embeddings {longest}")
    _cast(model, dtype)
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    return Target(
        f"{type(model).__name__} of {file}",
        LossAlone(model),
        (tokens,),
        {},
        batch * seq,
        f"{batch} x {seq} tokens",
        "the model gives its loss and no logits, so that its head can be computed in chunks",
    )


def _of_function(
    text: str, module: str, function: str, batch: int, seq: int, dtype: torch.dtype | None
) -> Target:
    make = _function(text, module, function)
    sizes = {"batch": batch, "seq": seq}
    known = inspect.signature(make).parameters
    try:
        with torch.device("meta"):
            made = make(**{name: size for name, size in sizes.items() if name in known})
    except Exception as error:  # the user's code
        raise OptionError(f"{text}: {_first_line(error)}") from None
    parts = made if isinstance(made, tuple) else (made,)
    model = parts[0]
    if not isinstance(model, nn.Module) or len(parts) > 3:
        raise OptionError(
            f"{text}: got {type(made).__name__}; needed a torch.nn.Module or (module, args, kwargs)"
        )
    if dtype is not None:
        _cast(model, dtype)
    if len(parts) == 1:
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
        shape = f"{batch} x {seq} tokens"
        return Target(text, model, (tokens,), {}, batch * seq, shape, "it gets token ids")
    args = parts[1]
    kwargs = parts[2] if len(parts) == 3 else {}
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise OptionError(f"{text}: needed (module, args, kwargs): a module, a tuple and a dict")
    if set(sizes) <= set(known):
        return Target(text, model, args, kwargs, batch * seq, f"{batch} x {seq} tokens")
    return Target(text, model, args, kwargs, None, "inputs as the function gives them")


def _function(text: str, module: str, function: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # the user's code
        raise OptionError(f"{text}: cannot import {module}: {_first_line(error)}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise OptionError(f"{text}: {module} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: buffers such as rotary frequencies stay as the model made them."""
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
