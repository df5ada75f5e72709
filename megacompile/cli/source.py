"""What the target of a command names: a config, or a function. torch is not needed to say that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import OptionError

# Files that people have at hand in place of a config.
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
    """Read a folder with a config.json, a json file, or `package.module:function`.

    Raises:
        OptionError: it is none of them, or the file has no config in it.
    """
    path = Path(text)
    if path.suffix.lower() in _WEIGHTS and ":" not in text:
        raise OptionError(
            f"{text} is {_WEIGHTS[path.suffix.lower()]}; needed the config of the model that they "
            "are of: a folder with a Hugging Face config.json, or a json file"
        )
    if path.is_dir() or path.suffix == ".json":
        return _config(path / "config.json" if path.is_dir() else path)
    module, _, function = text.partition(":")
    if not function or not module:
        raise OptionError(
            f"{text!r} is no folder with a config.json, no json file, no package.module:function"
        )
    return Function(module, function)


def _config(file: Path) -> Config:
    if not file.is_file():
        raise OptionError(f"there is no file {str(file)!r}{_others(file.parent)}")
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise OptionError(f"{file} is no JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise OptionError(f"{file} has no model_type, as Hugging Face's config.json has it")
    return Config(file, given.pop("model_type"), given)


def _others(folder: Path) -> str:
    """What lies in a folder without a config that looks like a model."""
    found = sorted({p.suffix for p in folder.glob("*") if p.suffix.lower() in _WEIGHTS})
    return f" (the folder has {', '.join(found)} files, which are weights alone)" if found else ""
