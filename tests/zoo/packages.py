"""The packages that the zoo's models come from: which are there, and in which version."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util

import torch

PACKAGES = ("torch", "transformers", "torchvision", "timm", "diffusers")

# What torchvision looks for when it is imported, with what it says of them itself.
_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def is_installed(package: str) -> bool:
    """Is a package there?"""
    return importlib.util.find_spec(package) is not None


def version(package: str) -> str:
    """The version of a package, without the part that says for which device it was built."""
    return importlib.metadata.version(package).partition("+")[0]


@functools.cache
def prepare() -> None:
    """Let torchvision be imported next to a torch that was built for another device: no model here
    needs the operators at which its import stops."""
    if not is_installed("torchvision"):
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as failed:
        if "torchvision::" not in str(failed):
            raise
        _library().define(_OPERATORS["nms"])
        _library().define(_OPERATORS["qnms"])
        importlib.import_module("torchvision")


@functools.cache
def _library() -> torch.library.Library:
    """Kept: operators go with the object that has defined them."""
    return torch.library.Library("torchvision", "FRAGMENT")
