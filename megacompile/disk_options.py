"""The options of `megacompile()` that are about a disk: what is refused."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from megacompile.errors import OptionError, OptionTypeError
from megacompile.sizes import parse_bytes


def folder(value: Any) -> str | None:
    """The folder of scratch files, as an absolute path."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise OptionTypeError(
            f"megacompile(): option 'disk' got {value!r} ({type(value).__name__}); needed None or "
            "the path of a folder"
        )
    path = os.path.abspath(os.fsdecode(value))
    if sys.platform != "linux":
        raise OptionError(
            f"megacompile(): got disk={path!r}; scratch files need Linux; leave it out"
        )
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        raise OptionError(
            f"megacompile(): got disk={path!r}; needed a folder that this process can write to, on "
            "a local disk"
        )
    return path


def size_bytes(value: Any, there: str | None) -> int | None:
    """Bytes that may be taken on the disk; None: what is free."""
    if value is None:
        return None
    if there is None:
        raise OptionError(
            f"megacompile(): got disk_memory={value!r} without disk=; needed the folder "
            "that it is about; name one, or leave disk_memory out"
        )
    return parse_bytes("disk_memory", value, shutil.disk_usage(there).free)


def check_weights(asked: bool | None, there: str | None, compute_dtype: object) -> None:
    """Raise where parameters cannot be on a disk."""
    wrong = _NO_FOLDER if there is None else ""
    if not wrong and compute_dtype is not None:
        wrong = f"with compute_dtype={compute_dtype}; masters do not go to a disk; leave that out"
    if asked and wrong:
        raise OptionError(f"megacompile(): got disk_weights=True {wrong}, or leave it out")


def check_saved(asked: bool | None, there: str | None, stays: str) -> None:
    """Raise where saved tensors cannot.

    Args:
        stays: the value of `activations` with which nothing waits on the host.
    """
    wrong = _NO_FOLDER if there is None else ""
    if not wrong and stays:
        wrong = (
            f"with activations={stays!r}; only what waits on the host goes on to a disk; use "
            "activations='offload'"
        )
    if asked and wrong:
        raise OptionError(f"megacompile(): got disk_saved=True {wrong}, or leave it out")


_NO_FOLDER = "without disk=; needed the folder that they lie in; name one"
