"""The training steps that are measured: which model, on which batch, with what of a machine.

Unless said otherwise 3.89 B parameters (12 layers of Qwen2.5-7B's width and vocabulary) in bf16,
16x1024 tokens, AdamW with float32 moments, gradients clipped to norm 1 (not in the backward).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.models import SHAPE_14B, SHAPE_32B, SHAPE_72B, SHAPE_120B

_DISK = tempfile.gettempdir()
_RECOMPUTED: dict[str, Any] = {"activations": "recompute"}
_STREAMED: dict[str, Any] = {**_RECOMPUTED, "resident": 0}


@dataclass(frozen=True, slots=True)
class Case:
    """One training step of a model."""

    name: str
    layers: int = 12
    batch: int = 16
    length: int = 1024
    cap_gib: float | None = None  # of device memory, for this process
    options: Mapping[str, Any] = field(default_factory=dict)  # of `megacompile()`
    state_dtype: torch.dtype | str | None = torch.float32
    dtype: torch.dtype = torch.bfloat16  # of the parameters
    shape: Mapping[str, int] = field(default_factory=dict)  # of `qwen2()`, beside its layers
    float8: str | None = None  # torchao's recipe for the linear layers but the head
    in_backward: bool = False  # is the update made there?
    written_late: bool = False  # it is larger than the memory: it gets its values streamed
    warm: int = 2  # steps between the first one and those
    steps: int = 5  # that are timed

    @property
    def text(self) -> str:
        """ "12 layers, 16x1024, 24 GiB"."""
        cap = "" if self.cap_gib is None else f", {self.cap_gib:g} GiB"
        return f"{self.layers} layers, {self.batch}x{self.length}{cap}"


def _streamed(name: str, **other: Any) -> Case:
    """Everything streamed and recomputed."""
    return Case(name, options=_STREAMED, **other)


def _below_its_size(name: str, options: Mapping[str, Any]) -> Case:
    """Less memory than the parameters take, and many tokens."""
    return Case(name, layers=28, batch=64, cap_gib=12, steps=2, options=options, written_late=True)


def _in_tiles(name: str, layers: int, length: int) -> Case:
    """One sequence, so long that a plan needs tiles."""
    return Case(
        name,
        layers=layers,
        batch=1,
        length=length,
        in_backward=True,
        state_dtype="int8",
        warm=0,
        steps=1,
    )


GROUPS: dict[str, tuple[Case, ...]] = {
    "optimizer": (
        _streamed("exact"),
        _streamed("exact", batch=64, steps=3),
        _streamed("in the backward", in_backward=True),
        _streamed("in the backward, 8-bit", in_backward=True, state_dtype="int8"),
        _streamed("exact, 8-bit", state_dtype="int8", steps=2),
        Case(
            "exact, fp32 masters",
            options={
                **_STREAMED,
                "compute_dtype": torch.bfloat16,
                "grad_dtype": torch.bfloat16,
            },
            state_dtype=None,
            dtype=torch.float32,
            steps=3,
        ),
    ),
    "planned": (
        Case("planned"),
        Case("planned", batch=64, steps=3),
        Case("planned", layers=28, steps=4),
    ),
    "capped": (
        Case("planned", layers=28, cap_gib=24, steps=3),
        Case("in the backward", layers=28, cap_gib=24, in_backward=True, steps=3),
        Case(
            "in the backward, 8-bit",
            layers=28,
            cap_gib=24,
            in_backward=True,
            state_dtype="int8",
            steps=3,
        ),
    ),
    "memory": tuple(
        Case("planned", batch=4, cap_gib=gib, steps=4) for gib in (10, 16, 28, 48, 80, 139)
    ),
    "context": (
        Case("planned", layers=28, batch=1, length=131072, cap_gib=80, warm=1, steps=1),
        Case("planned", layers=12, batch=1, length=131072, cap_gib=80, warm=1, steps=1),
        Case("planned", layers=28, batch=1, length=262144, warm=0, steps=1),
        # a quarter of the layers, and all: a step of these takes some eight minutes
        _in_tiles("in the backward, 8-bit", layers=7, length=524288),
        _in_tiles("in the backward, 8-bit", layers=28, length=524288),
    ),
    # tiles save nothing of what they compute: they compare to the second one, which does not either
    "tiles": (
        Case("planned", layers=28, batch=1, length=16384, steps=3),
        Case("recomputed", layers=28, batch=1, length=16384, steps=3, options=_RECOMPUTED),
        Case("planned, 8 tiles", layers=28, batch=1, length=16384, steps=3, options={"tiles": 8}),
        # as few as a plan tries
        Case("planned, 4 tiles", layers=28, batch=1, length=16384, steps=3, options={"tiles": 4}),
    ),
    # 16 tiles of 4 sequences each, attention included; and what a plan does with as much memory
    "samples": (
        _below_its_size("planned, 16 tiles", {"tiles": 16}),
        _below_its_size("planned", {}),
    ),
    "float8": tuple(
        Case(name, layers=layers, batch=64, float8=recipe, warm=1, steps=3)
        for layers in (12, 28)
        for name, recipe in (
            ("bf16", None),
            ("float8, tensorwise", "tensorwise"),
            ("float8, rowwise", "rowwise"),
        )
    ),
    "tiers": (
        Case("planned", layers=48, shape=SHAPE_14B, steps=3),
        Case("planned, 8-bit", layers=64, shape=SHAPE_32B, state_dtype="int8", steps=3),
        Case(
            "in the backward, 8-bit",
            layers=64,
            shape=SHAPE_32B,
            in_backward=True,
            state_dtype="int8",
            steps=3,
        ),
        Case(
            "planned, 40 GiB of host memory and a disk",
            layers=28,
            batch=64,
            options={"host_memory": "40GiB", "disk": _DISK},
            steps=2,
        ),
        # 62.2 B parameters; a step of these takes most of a minute
        Case(
            "in the backward, 8-bit, and a disk",
            layers=68,
            batch=64,
            shape=SHAPE_72B,
            options={"disk": _DISK},
            state_dtype="int8",
            in_backward=True,
            warm=0,
            steps=1,
        ),
        # 120 B parameters, on a host with 503 GiB. How much the system needs beside so much
        # page-locked memory (tables of its pages) is not known: this leaves it 18 GiB.
        Case(
            "in the backward, 8-bit",
            layers=88,
            shape=SHAPE_120B,
            options={"host_memory": "485GiB"},
            state_dtype="int8",
            in_backward=True,
            written_late=True,
            warm=0,
            steps=2,
        ),
    ),
}
