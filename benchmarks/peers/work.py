"""The work that every system does: which model, on which tokens, within what memory.

All train the same weights on the same batch: the model and the tokens come from seeds. The model is
built in bf16 on the device and moved to the host before the memory limit is set, so that a system
places it as it likes. A system with float32 master weights gets the same bf16 values in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.models import SHAPE_14B, SHAPE_32B, Loss, qwen2

CLIP_NORM = 1.0
LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01
SEED = 1  # of the tokens; `qwen2` seeds the weights


@dataclass(frozen=True, slots=True)
class Model:
    """A Qwen2: its depth, and its shape as arguments of `qwen2()`."""

    layers: int
    text: str
    shape: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.shape.get("vocabulary", 152064))


MODELS = {
    "tiny": Model(2, "a test", {"width": 256, "vocabulary": 512}),
    "3.9b": Model(12, "Qwen2.5-7B's shape"),
    "7.6b": Model(28, "Qwen2.5-7B's shape"),
    "14.8b": Model(48, "Qwen2.5-14B's shape", SHAPE_14B),
    "32.8b": Model(64, "Qwen2.5-32B's shape", SHAPE_32B),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, its tokens and its memory: the systems are compared at one setting."""

    model: str  # a key of MODELS
    batch: int
    length: int
    cap_gib: float | None = None  # of GPU memory; None: all of it

    @property
    def text(self) -> str:
        """ "3.9b, 16x1024, 24 GiB"."""
        cap = "" if self.cap_gib is None else f", {self.cap_gib:g} GiB"
        return f"{self.model}, {self.batch}x{self.length}{cap}"


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one setting, once: what one process measures."""

    setting: Setting
    peer: str
    repeat: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values, flat."""
        return {**asdict(self.setting), "peer": self.peer, "repeat": self.repeat}

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Point:
        """The point that `as_json` wrote."""
        names = ("model", "batch", "length", "cap_gib")
        setting = Setting(**{name: values[name] for name in names})
        return Point(setting, values["peer"], values["repeat"])


def build(setting: Setting, device: str, *, masters: bool) -> Loss:
    """The model in host memory, as a module that returns its loss.

    Args:
        setting: names the model.
        device: where the random weights are made.
        masters: float32 parameters, with the same values as the bf16 ones.
    """
    model = MODELS[setting.model]
    inner = qwen2(model.layers, device=device, **model.shape).to("cpu")
    if device == "cuda":
        torch.cuda.empty_cache()
    return Loss(inner.float() if masters else inner)


def batch(setting: Setting, device: str) -> torch.Tensor:
    """Token ids (batch, length), int64; the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    high = MODELS[setting.model].vocabulary
    ids = torch.randint(high, (setting.batch, setting.length), generator=generator)
    return ids.to(device)
