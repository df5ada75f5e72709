"""The systems that are compared: what each keeps in which precision, and what it needs.

All compute in bf16. What they keep differs, and a table that hides it compares nothing: `weights`,
`moments`, `recomputes` and `clips` are printed beside the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SYSTEMS = "benchmarks.peers.systems"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to train the model."""

    name: str
    text: str
    setup: str  # "module:function", which gives a `System`
    weights: str  # what is kept of them, beside the bf16 copy that computes
    moments: str
    recomputes: str
    clips: str = "norm 1"
    options: Mapping[str, Any] = field(default_factory=dict)  # of `setup`
    masters: bool = False  # does it get float32 parameters?
    package: str = "torch"  # whose version is shown
    minimum: tuple[int, int] = (0, 0)  # that version, at least
    needs_gpu: bool = False
    build_s: float = 0.0  # more time for its processes: C++ is compiled at first use

    @property
    def comes_apart(self) -> bool:
        """True if `--wheels` may bring its package."""
        return self.package not in ("torch", "megacompile")


_ALL = "each layer"
_CHOSEN = "what the plan says"

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "plain",
            "PyTorch, resident, eager",
            f"{_SYSTEMS}.plain:setup",
            "bf16",
            "bf16",
            "nothing",
        ),
        Peer(
            "compiled",
            "PyTorch, resident, `torch.compile`",
            f"{_SYSTEMS}.plain:setup",
            "bf16",
            "bf16",
            "nothing",
            options={"compiled": True},
        ),
        Peer(
            "compiled-recompute",
            "PyTorch, resident, each layer compiled and checkpointed",
            f"{_SYSTEMS}.plain:setup",
            "bf16",
            "bf16",
            _ALL,
            options={"compiled": True, "recompute": True},
        ),
        Peer(
            "compiled-float8",
            "PyTorch, resident, `torch.compile`, torchao's float8 (tensorwise)",
            f"{_SYSTEMS}.plain:setup",
            "bf16",
            "bf16",
            "nothing",
            options={"compiled": True, "float8": "tensorwise"},
            package="torchao",
            minimum=(0, 10),
            needs_gpu=True,
        ),
        Peer(
            "compiled-recompute-float8",
            "PyTorch, resident, each layer compiled and checkpointed, "
            "torchao's float8 (tensorwise)",
            f"{_SYSTEMS}.plain:setup",
            "bf16",
            "bf16",
            _ALL,
            options={"compiled": True, "recompute": True, "float8": "tensorwise"},
            package="torchao",
            minimum=(0, 10),
            needs_gpu=True,
        ),
        Peer(
            "fsdp2",
            "FSDP2, resident, each layer compiled",
            f"{_SYSTEMS}.fsdp2:setup",
            "bf16",
            "bf16",
            "nothing",
        ),
        Peer(
            "fsdp2-offload",
            "FSDP2, `CPUOffloadPolicy`, each layer compiled",
            f"{_SYSTEMS}.fsdp2:setup",
            "bf16",
            "bf16",
            _ALL,
            options={"offload": True},
        ),
        Peer(
            "fsdp2-offload-masters",
            "FSDP2, `CPUOffloadPolicy`, each layer compiled, float32 parameters",
            f"{_SYSTEMS}.fsdp2:setup",
            "float32",
            "float32",
            _ALL,
            options={"offload": True},
            masters=True,
        ),
        Peer(
            "deepspeed",
            "DeepSpeed ZeRO-3, parameters and optimizer on the CPU, its defaults",
            f"{_SYSTEMS}.deepspeed:setup",
            "float32 masters",
            "float32",
            _ALL,
            package="deepspeed",
            minimum=(0, 19),
            build_s=240.0,
        ),
        Peer(
            "roundpipe",
            "RoundPipe, exact",
            f"{_SYSTEMS}.roundpipe:setup",
            "float32 masters",
            "float32",
            _ALL,
            package="roundpipe",
            minimum=(0, 1),
            needs_gpu=True,
            build_s=120.0,
        ),
        Peer(
            "roundpipe-stale",
            "RoundPipe, asynchronous: weights are one step old",
            f"{_SYSTEMS}.roundpipe:setup",
            "float32 masters",
            "float32",
            _ALL,
            options={"stale": True},
            package="roundpipe",
            minimum=(0, 1),
            needs_gpu=True,
            build_s=120.0,
        ),
        Peer(
            "torchao",
            "torchao `CPUOffloadOptimizer`, each layer compiled, parameters resident",
            f"{_SYSTEMS}.torchao:setup",
            "bf16",
            "bf16",
            _ALL,
            clips="no: gradients leave in the backward",
            package="torchao",
            minimum=(0, 10),
            needs_gpu=True,
        ),
        Peer(
            "megacompile",
            "**megacompile**, planned",
            f"{_SYSTEMS}.ours:setup",
            "bf16",
            "float32",
            _CHOSEN,
            package="megacompile",
        ),
        Peer(
            "megacompile-float8",
            "**megacompile**, planned, torchao's float8 (tensorwise)",
            f"{_SYSTEMS}.ours:setup",
            "bf16",
            "float32",
            _CHOSEN,
            options={"float8": "tensorwise"},
            package="torchao",
            minimum=(0, 10),
            needs_gpu=True,
        ),
        Peer(
            "megacompile-streamed",
            "**megacompile**, all streamed",
            f"{_SYSTEMS}.ours:setup",
            "bf16",
            "float32",
            _ALL,
            options={"streamed": True},
            package="megacompile",
        ),
        Peer(
            "megacompile-masters",
            "**megacompile**, all streamed, float32 parameters",
            f"{_SYSTEMS}.ours:setup",
            "float32",
            "float32",
            _ALL,
            options={"streamed": True},
            masters=True,
            package="megacompile",
        ),
        Peer(
            "megacompile-8bit",
            "**megacompile**, all streamed, update in the backward",
            f"{_SYSTEMS}.ours:setup",
            "bf16",
            "8-bit",
            _ALL,
            clips="no: the update is made in the backward",
            options={"streamed": True, "in_backward": True},
            package="megacompile",
        ),
    )
}

DEFAULT = (  # in the order that they run in: the most telling ones first
    "megacompile",
    "compiled",
    "megacompile-streamed",
    "deepspeed",
    "megacompile-masters",
    "fsdp2-offload",
    "fsdp2-offload-masters",
    "megacompile-8bit",
    "roundpipe",
    "roundpipe-stale",
    "torchao",
    "fsdp2",
)
