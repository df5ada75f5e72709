"""The options of `megacompile()`: frozen, validated once, never ignored."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from megacompile.errors import OptionError, OptionTypeError


class Lowering(enum.Enum):
    """How a stage's graph becomes code."""

    EAGER = "eager"  # the traced ATen graph, one kernel at a time: bitwise equal to the plain model
    INDUCTOR = "inductor"  # fused by TorchInductor: fast, equal within its own tolerance


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose. `resolve` fills in what was left open.

    Attributes:
        device: where stages compute. Default: the current CUDA device, else the CPU.
        lowering: default `INDUCTOR` on CUDA, `EAGER` on the CPU.
        lookahead: how many stages ahead of its use a bucket is prefetched (1 or more).
        slots: device buffers for prefetched buckets; at least `lookahead + 1`.
        progress: show progress bars on stderr. `None` shows them where stderr is a terminal.
        compute_dtype: what float32 parameters are streamed and computed in. Default: their own.
        grad_dtype: of the gradients on the host. Default: each parameter's own.
        state_dtype: of the optimizer's moments, or "int8". Default: each parameter's own.
        stochastic_rounding: of bfloat16 parameters by the optimizer.
        optimizer: whose update is made in the backward. Default: in `optimizer.step()`.
        detect_anomaly: raise where a stage's backward gives NaN or inf.
    """

    device: torch.device
    lowering: Lowering
    lookahead: int
    slots: int
    progress: bool | None
    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | str | None = None
    stochastic_rounding: bool = False
    optimizer: torch.optim.Optimizer | None = None
    detect_anomaly: bool = False

    @staticmethod
    def resolve(
        *,
        device: torch.device | str | int | None = None,
        lowering: Lowering | str | None = None,
        lookahead: int = 2,
        slots: int | None = None,
        progress: bool | None = None,
        compute_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        detect_anomaly: bool = False,
    ) -> Options:
        """Validate what the user gave and fill in the rest.

        Raises:
            OptionError: a value is out of range, or a device that is not there.
            OptionTypeError: a value has the wrong type (also a `TypeError`).
        """
        resolved_device = _device(device)
        lookahead = _count("lookahead", lookahead, least=1)
        slots = lookahead + 1 if slots is None else _count("slots", slots, least=2)
        if slots < lookahead + 1:
            raise OptionError(
                f"megacompile(): got slots={slots} with lookahead={lookahead}; a prefetch "
                f"{lookahead} stages ahead needs at least {lookahead + 1} slots; "
                "raise slots or lower lookahead"
            )
        if progress is not None and not isinstance(progress, bool):
            raise OptionTypeError(_wrong_type("progress", progress, "True, False or None"))
        return Options(
            device=resolved_device,
            lowering=_lowering(lowering, resolved_device),
            lookahead=lookahead,
            slots=slots,
            progress=progress,
            compute_dtype=_dtype("compute_dtype", compute_dtype, _HALVES),
            grad_dtype=_dtype("grad_dtype", grad_dtype, (*_HALVES, torch.float32)),
            state_dtype=_dtype("state_dtype", state_dtype, (torch.float32, torch.bfloat16, "int8")),
            stochastic_rounding=_flag("stochastic_rounding", stochastic_rounding),
            optimizer=_optimizer(optimizer),
            detect_anomaly=_flag("detect_anomaly", detect_anomaly),
        )

    def differences(self, other: Options) -> list[str]:
        """Fields in which `other` differs, as "name: mine -> theirs"."""
        return [
            f"{field.name}: {getattr(self, field.name)} -> {getattr(other, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionTypeError(_wrong_type(name, value, "True or False"))
    return value


def _optimizer(value: Any) -> torch.optim.Optimizer | None:
    known = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    if value is None or type(value) in known:
        return value  # type: ignore[no-any-return]
    needed = "a torch.optim AdamW, Adam or SGD, which can update in the backward"
    if not isinstance(value, torch.optim.Optimizer):
        raise OptionTypeError(_wrong_type("optimizer", value, needed))
    raise OptionError(
        f"megacompile(): got optimizer={type(value).__name__}; needed {needed}; leave it out, and "
        "every optimizer works in optimizer.step()"
    )


_HALVES = (torch.bfloat16, torch.float16)


def _dtype(name: str, value: Any, allowed: Sequence[torch.dtype | str]) -> Any:
    """A dtype option, or None."""
    needed = "None or one of " + ", ".join(str(dtype) for dtype in allowed)
    if value is not None and not isinstance(value, (torch.dtype, str)):
        raise OptionTypeError(_wrong_type(name, value, needed))
    if value is not None and value not in allowed:
        raise OptionError(f"megacompile(): got {name}={value!r}; needed {needed}")
    return value


def _wrong_type(name: str, got: object, needed: str) -> str:
    return f"megacompile(): option {name!r} got {got!r} ({type(got).__name__}); needed {needed}"


def _count(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(_wrong_type(name, value, f"an int of at least {least}"))
    if value < least:
        raise OptionError(f"megacompile(): got {name}={value}; needed at least {least}")
    return value


def _lowering(value: object, device: torch.device) -> Lowering:
    if value is None:
        return Lowering.INDUCTOR if device.type == "cuda" else Lowering.EAGER
    if isinstance(value, Lowering):
        return value
    names = ", ".join(repr(member.value) for member in Lowering)
    if not isinstance(value, str):
        raise OptionTypeError(_wrong_type("lowering", value, f"one of {names}"))
    try:
        return Lowering(value)
    except ValueError:
        raise OptionError(f"megacompile(): got lowering={value!r}; needed one of {names}") from None


def _device(value: object) -> torch.device:
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise OptionTypeError(_wrong_type("device", value, "a torch.device, 'cuda:0' or 'cpu'"))
    if isinstance(value, int) and not 0 <= value < 128:  # torch keeps 8 bits: 256 would be cuda:0
        raise OptionError(f"megacompile(): got device={value}; needed the index of a CUDA device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError as error:
        raise OptionError(f"megacompile(): got device={value!r}: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise OptionError(
            f"megacompile(): got device={str(device)!r}; needed a 'cuda' device or 'cpu'"
        )
    if not torch.cuda.is_available():
        raise OptionError(
            f"megacompile(): got device={str(device)!r}, but this machine has no CUDA device "
            "(torch.cuda.is_available() is False); use device='cpu' or leave it out"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise OptionError(
            f"megacompile(): got device='cuda:{index}', but there are "
            f"{torch.cuda.device_count()} CUDA devices; use an index below that"
        )
    return torch.device("cuda", index)
