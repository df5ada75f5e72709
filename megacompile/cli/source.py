"""Parses a command's target, a config or a function, without torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import MissingExtraError, OptionError

# Files that users may give instead of a config.
_WEIGHTS = {
    ".gguf": "a GGUF file: quantized weights for inference",
    **dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".ckpt"), "a file of weights"),
}


@dataclass(frozen=True, slots=True)
class Config:
    """A Hugging Face config."""

    file: Path
    model_type: str
    values: dict[str, Any]  # without the type


@dataclass(frozen=True, slots=True)
class Function:
    """A function that makes a model."""

    module: str
    name: str


def parse(text: str) -> Config | Function:
    """Parse a folder with a config.json, a json file, or `package.module:function`.

    Raises:
        OptionError: none of these, or a file without a config.
    """
    path = Path(text)
    if path.suffix.lower() in _WEIGHTS and ":" not in text:
        raise OptionError(
            f"{text} is {_WEIGHTS[path.suffix.lower()]}; needed the model's config: "
            "a folder with a Hugging Face config.json, or a json file"
        )
    if path.is_dir() or path.suffix == ".json":
        return _config(path / "config.json" if path.is_dir() else path)
    module, _, function = text.partition(":")
    if not function or not module:
        raise OptionError(
            f"{text!r} is not a folder with a config.json, a json file or package.module:function"
        )
    return Function(module, function)


def check(text: str, *, seq: int) -> None:
    """Check a target without torch, as far as possible. Imports a function's module.

    Args:
        text: as for `parse`.
        seq: tokens per sequence.

    Raises:
        OptionError: no such target or function, or a sequence that is too long.
        MissingExtraError: transformers is not installed, and a config needs it.
    """
    named = parse(text)
    if isinstance(named, Function):
        function(text, named)
        return
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("a config needs transformers: pip install transformers")
    check_length(seq, named.values.get("max_position_embeddings"))


def check_length(seq: int, longest: object) -> None:
    """Check the sequence length against the config's positions, if it limits them.

    Raises:
        OptionError: too long.
    """
    if isinstance(longest, int) and seq > longest:
        raise OptionError(
            f"--seq {seq}: the config has max_position_embeddings {longest}; lower --seq"
        )


def function(text: str, named: Function) -> Callable[..., Any]:
    """Import and return the function that a target names.

    Raises:
        OptionError: the module cannot be imported, or has no such function.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(named.module), named.name, None)
    except Exception as error:  # the user's code
        raise OptionError(f"{text}: cannot import {named.module}: {first_line(error)}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise OptionError(f"{text}: {named.module} has no function {named.name!r}")
    return found  # type: ignore[no-any-return]


def first_line(error: Exception) -> str:
    """An error of user code in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _config(file: Path) -> Config:
    if not file.is_file():
        raise OptionError(f"no such file: {str(file)!r}{_others(file.parent)}")
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise OptionError(f"{file} is not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise OptionError(f"{file} has no model_type; needed a Hugging Face config.json")
    return Config(file, given.pop("model_type"), given)


def _others(folder: Path) -> str:
    """Note about weight files in a folder without a config."""
    found = sorted({p.suffix for p in folder.glob("*") if p.suffix.lower() in _WEIGHTS})
    return f" (the folder has {', '.join(found)} files, which are only weights)" if found else ""
