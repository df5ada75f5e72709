"""The options of `megacompile()`: frozen, validated once, never ignored."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from megacompile import disk_options, host_memory, mesh_options
from megacompile.errors import OptionError, OptionTypeError
from megacompile.runtime.optim.registry import RULES, listed, rule_of
from megacompile.sizes import parse_bytes

_E = TypeVar("_E", bound=enum.Enum)


class Lowering(enum.Enum):
    """The way a stage's graph becomes code."""

    EAGER = "eager"  # the traced ATen graph, one kernel at a time: bitwise equal to the plain model
    INDUCTOR = "inductor"  # fused by TorchInductor: fast, equal within its own tolerance


class Head(enum.Enum):
    """The way a language model's head and its loss are computed."""

    AUTO = "auto"  # in chunks with Inductor, where logits would take more than 1 GiB
    WHOLE = "whole"  # as the model has it
    CHUNKED = "chunked"  # in chunks of tokens, so that logits are never there as a whole


class Activations(enum.Enum):
    """The place of the tensors that a stage's backward takes from its forward."""

    AUTO = "auto"  # what the plan finds best
    KEEP = "keep"  # saved tensors stay on the device
    SELECTIVE = "selective"  # about half of them do, the rest is computed again
    RECOMPUTE = "recompute"  # stage inputs stay on the device, all else is computed again
    OFFLOAD = "offload"  # stage inputs wait on the host, all else is computed again


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a user. `resolve` fills in what was left open.

    Attributes:
        device: where stages compute. Default: the current CUDA device, else the CPU.
        lowering: default `INDUCTOR` on CUDA, `EAGER` on the CPU.
        lookahead: how many stages ahead of its use a bucket is prefetched (1 or more).
        slots: device buffers for prefetched buckets. None: `least_slots`, and more if the plan
            finds that more make the step faster.
        progress: show bars, and what the first step waits for, on stderr. None: on a
            terminal; elsewhere one line, once, where a part of the step takes 5 s. False where
            another rank is the first one of `mesh`.
        compute_dtype: the dtype that float32 parameters are streamed and computed in. Default:
            their own.
        grad_dtype: the dtype of gradients on the host. Default: each parameter's own.
        state_dtype: the dtype of the optimizer's moments, or "int8". Default: each parameter's own.
        stochastic_rounding: the optimizer rounds bfloat16 parameters at random. A model without any
            to train is a warning, no error, because a script may set it for several models.
        optimizer: the optimizer whose update the backward makes. Default: none, the update is made
            in `optimizer.step()`.
        device_update: the share of the parameters (0 to 1), the first in forward order, that
            `optimizer.step()` updates on the device. Those whose states are on a disk do not
            count. With 0 the device does not help with the others either. Default: what the plan
            finds best, with INDUCTOR on CUDA and without `compute_dtype` and `disk_weights=True`;
            otherwise none.
        gpu_memory: bytes of device memory that the plan may use. Default: what is free.
        host_memory: bytes of host memory that the model may take. Default: what is free.
        disk: the folder that optimizer states of streamed buckets may be in. Default: none, they
            are in host memory.
        disk_memory: bytes that everything may take there; of ranks, what each may. Default: what
            is free, of which each has its part.
        disk_weights: the parameters of streamed buckets are there too. Default: of as few of them
            as it takes, where nothing else fits.
        disk_saved: what waits on the host between forward and backward goes on to the disk.
            Default: as little of it as host memory asks for.
        resident: bytes of device memory for buckets that live there. Default: the plan decides.
        head: whether the head and its loss are computed in chunks of tokens.
        tiles: in which what acts on each token alone runs; 1: none. Default: the plan decides, with
            INDUCTOR and without `mesh`: where nothing else fits, or a step gets shorter by 3 %.
        detect_anomaly: raise if a stage's backward returns NaN or inf.
        activations: where saved tensors wait between forward and backward, or if they are
            recomputed.
        dynamic: whether sizes are symbols: from the start, never, or once they have changed (None).
        mesh: the ranks that share the model. Default: this process alone.
    """

    device: torch.device
    lowering: Lowering
    lookahead: int
    slots: int | None
    progress: bool | None
    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | str | None = None
    stochastic_rounding: bool = False
    optimizer: torch.optim.Optimizer | None = None
    device_update: float | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    disk: str | None = None
    disk_memory: int | None = None
    disk_weights: bool | None = None
    disk_saved: bool | None = None
    resident: int | None = None
    head: Head = Head.AUTO
    tiles: int | None = None
    detect_anomaly: bool = False
    activations: Activations = Activations.AUTO
    dynamic: bool | None = None
    mesh: DeviceMesh | mesh_options.PlannedMesh | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that have a part of each parameter.

        With several, plans choose nothing by themselves that collectives depend on: ranks whose
        inputs have other shapes, or that have other rates and budgets, must issue the same ones.
        """
        return 1 if self.mesh is None else self.mesh.size(self.mesh.ndim - 1)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same part of each parameter (HSDP)."""
        return 1 if self.mesh is None or self.mesh.ndim == 1 else self.mesh.size(0)

    @property
    def rank(self) -> int:
        """This process's place among the ranks that have parts of the same parameters."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def least_slots(self) -> int:
        """The smallest number with which every bucket is prefetched `lookahead` stages ahead."""
        return self.lookahead + 1 if self.slots is None else self.slots

    @property
    def plans_device_update(self) -> bool:
        """True if the plan may choose device updates, if `device_update` is left open."""
        return (
            self.lowering is Lowering.INDUCTOR
            and self.optimizer is None
            and self.compute_dtype is None
            and not self.disk_weights
        )

    @property
    def device_helps(self) -> bool:
        """True if a GPU helps the host with the updates that are no device updates."""
        return (
            self.lowering is Lowering.INDUCTOR
            and self.optimizer is None
            and not self.disk_weights
            and self.device_update != 0.0
            and not self.stochastic_rounding
        )

    @property
    def may_store_weights(self) -> bool:
        """True if parameters may go to the disk, if `disk_weights` is left open."""
        return (
            self.disk is not None
            and self.disk_weights is None
            and self.mesh is None
            and self.compute_dtype is None
        )

    @property
    def plans(self) -> bool:
        """Is a plan searched for? On the CPU only if the user gives `gpu_memory`."""
        return self.device.type == "cuda" or self.gpu_memory is not None

    @property
    def updates_on_device(self) -> bool:
        """True if parameters of float32 masters may be updated on the device."""
        return self.optimizer is not None or bool(self.device_update) or self.device_helps

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
        device_update: float | None = None,
        gpu_memory: int | float | str | None = None,
        host_memory: int | float | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_memory: int | float | str | None = None,
        disk_weights: bool | None = None,
        disk_saved: bool | None = None,
        resident: int | float | str = "auto",
        head: Head | str = "auto",
        tiles: int | str = "auto",
        detect_anomaly: bool = False,
        activations: Activations | str = Activations.AUTO,
        dynamic: bool | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Options:
        """Validate what the user gave and fill in the rest.

        Raises:
            OptionError: a value is out of range, or the device does not exist.
            OptionTypeError: a value has the wrong type (also a `TypeError`).
        """
        resolved_device = _device(device)
        lookahead = _count("lookahead", lookahead, least=1)
        progress, dynamic = _open_flag("progress", progress), _open_flag("dynamic", dynamic)
        disk_weights = _open_flag("disk_weights", disk_weights)
        disk_saved = _open_flag("disk_saved", disk_saved)
        resolved_lowering = _lowering(lowering, resolved_device)
        device_update = _share("device_update", device_update)
        if device_update:
            _check_device_update(device_update, resolved_lowering, optimizer, disk_weights)
        folder = disk_options.folder(disk)
        waits = _choice("activations", activations, Activations)
        disk_options.check_weights(disk_weights, folder, compute_dtype)
        may_wait = waits in (Activations.OFFLOAD, Activations.AUTO)
        disk_options.check_saved(disk_saved, folder, "" if may_wait else waits.value)
        return Options(
            device=resolved_device,
            lowering=resolved_lowering,
            lookahead=lookahead,
            slots=_slots(slots, lookahead),
            progress=progress if mesh_options.is_first(mesh) else False,
            compute_dtype=_dtype("compute_dtype", compute_dtype, _HALVES),
            grad_dtype=_dtype("grad_dtype", grad_dtype, (*_HALVES, torch.float32)),
            state_dtype=_dtype("state_dtype", state_dtype, (torch.float32, torch.bfloat16, "int8")),
            stochastic_rounding=_flag("stochastic_rounding", stochastic_rounding),
            optimizer=_optimizer(optimizer),
            device_update=device_update,
            gpu_memory=_size("gpu_memory", gpu_memory, resolved_device),
            host_memory=_size("host_memory", host_memory, torch.device("cpu")),
            disk=folder,
            disk_memory=disk_options.size_bytes(disk_memory, folder),
            disk_weights=disk_weights,
            disk_saved=disk_saved,
            resident=_resident(resident, resolved_device),
            head=_choice("head", head, Head),
            tiles=_tiles(tiles),
            detect_anomaly=_flag("detect_anomaly", detect_anomaly),
            activations=waits,
            dynamic=dynamic,
            mesh=mesh_options.checked(mesh, resolved_device, disk_weights=disk_weights),
        )

    @property
    def of_all_ranks(self) -> dict[str, str]:
        """The options that ranks which share a model need alike, as text."""
        values = {name: getattr(self, name) for name in _OF_ALL_RANKS}
        if self.optimizer is not None:
            values["optimizer"] = type(self.optimizer).__name__
        return {name: str(getattr(value, "value", value)) for name, value in values.items()}

    def differences(self, other: Options) -> list[str]:
        """The options in which `other` differs, as "name: mine -> theirs", as a user writes
        them."""
        return [
            f"{name}: {_as_given(name, mine)} -> {_as_given(name, theirs)}"
            for name in (field.name for field in fields(self))
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]


# Collectives depend on them, or numbers. What else ranks choose each has for itself: memory, disks.
_OF_ALL_RANKS = (
    "lowering",
    "lookahead",
    "slots",
    "compute_dtype",
    "grad_dtype",
    "state_dtype",
    "stochastic_rounding",
    "optimizer",
    "head",
    "tiles",
    "dynamic",
)


_REMOVED = {"whole_buckets": "leave it out; ranks gather their parts of a bucket on the GPUs"}


def refuse_removed(given: Mapping[str, object]) -> None:
    """Raise for options that `megacompile()` does not have.

    Args:
        given: by name.

    Raises:
        OptionTypeError: there are any; one of an earlier version is told what to do instead.
    """
    for name in given:
        if name in _REMOVED:
            raise OptionTypeError(f"megacompile(): {name}= was removed; {_REMOVED[name]}")
        raise OptionTypeError(f"megacompile() got an unexpected keyword argument {name!r}")


def _as_given(name: str, value: Any) -> str:
    """The text of an option's value: what one writes to ask for it."""
    if name == "resident" and value in (None, sys.maxsize):
        return repr("auto" if value is None else "all")
    if isinstance(value, torch.optim.Optimizer):
        return type(value).__name__
    return str(value) if isinstance(value, torch.device) else repr(getattr(value, "value", value))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionTypeError(_wrong_type(name, value, "True or False"))
    return value


def _open_flag(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise OptionTypeError(_wrong_type(name, value, "True, False or None"))
    return value


def _slots(value: object, lookahead: int) -> int | None:
    if value is None:
        return None
    slots = _count("slots", value, least=2)
    if slots < lookahead + 1:
        raise OptionError(
            f"megacompile(): got slots={slots} with lookahead={lookahead}; a prefetch "
            f"{lookahead} stages ahead needs at least {lookahead + 1} slots; "
            "raise slots or lower lookahead"
        )
    return slots


def _check_device_update(
    share: float, lowering: Lowering, optimizer: object, disk_weights: bool | None
) -> None:
    got = f"megacompile(): got device_update={share} with"
    if optimizer is not None:
        raise OptionError(
            f"{got} optimizer=...; there every update is made in the backward; leave one of them "
            "out"
        )
    if lowering is Lowering.EAGER:
        raise OptionError(
            f"{got} lowering='eager', whose updates are torch.optim's own; leave it out, or use "
            "lowering='inductor'"
        )
    if disk_weights:
        raise OptionError(
            f"{got} disk_weights=True; the device would update parameters that are read from a "
            "disk; leave one of them out"
        )


def _optimizer(value: Any) -> torch.optim.Optimizer | None:
    if value is None:
        return None
    needed = f"one that can update in the backward: {listed(RULES, 'or')}"
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
        needed = f"one that has parameters: {value.__name__}(model.parameters(), ...)"
    if not isinstance(value, torch.optim.Optimizer):
        raise OptionTypeError(_wrong_type("optimizer", value, needed))
    rule = rule_of(value)
    why_not = "" if rule is None else rule.stands_back(value)
    if rule is not None and not why_not:
        return value
    got = type(value).__name__ + (f" ({why_not})" if why_not else "")
    raise OptionError(
        f"megacompile(): got optimizer={got}; needed {needed}; leave it out, and every optimizer "
        "works in optimizer.step()"
    )


_HALVES = (torch.bfloat16, torch.float16)


def _dtype(name: str, value: Any, allowed: Sequence[torch.dtype | str]) -> Any:
    """A dtype option, or None."""
    needed = "None or one of " + ", ".join(repr(dtype) for dtype in allowed)
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


def _tiles(value: object) -> int | None:
    """In how many tiles; None: the plan decides."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(_wrong_type("tiles", value, "'auto' or an int of at least 1"))
    return _count("tiles", value, least=1)


def _share(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionTypeError(_wrong_type(name, value, "None or a number from 0 to 1"))
    if not 0 <= value <= 1:  # nor nan
        raise OptionError(f"megacompile(): got {name}={value}; needed a number from 0 to 1")
    return float(value)


def _size(name: str, value: Any, device: torch.device, *, words: str = "") -> int | None:
    total_bytes = _device_bytes(device) if isinstance(value, float) else 0
    return None if value is None else parse_bytes(name, value, total_bytes, words=words)


def _device_bytes(device: torch.device) -> int:
    """Memory of a device: all of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory.total_bytes()


def _resident(value: Any, device: torch.device) -> int | None:
    """Bytes for resident buckets; None: the plan decides."""
    if value == "auto":
        return None
    if value == "all":
        return sys.maxsize
    return _size("resident", value, device, words="'auto', 'all', ")


def _lowering(value: object, device: torch.device) -> Lowering:
    if value is None:
        return Lowering.INDUCTOR if device.type == "cuda" else Lowering.EAGER
    return _choice("lowering", value, Lowering)


def _choice(name: str, value: object, choices: type[_E]) -> _E:
    """A member of an enum, or its value."""
    if isinstance(value, choices):
        return value
    names = ", ".join(repr(member.value) for member in choices)
    if not isinstance(value, str):
        raise OptionTypeError(_wrong_type(name, value, f"one of {names}"))
    try:
        return choices(value)
    except ValueError:
        raise OptionError(f"megacompile(): got {name}={value!r}; needed one of {names}") from None


def _device(value: object) -> torch.device:
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise OptionTypeError(_wrong_type("device", value, "a torch.device, 'cuda:0' or 'cpu'"))
    if isinstance(value, int) and not 0 <= value < 128:  # torch keeps 8 bits: 256 would be cuda:0
        raise OptionError(f"megacompile(): got device={value}; needed the index of a CUDA device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:  # which lists every backend that torch knows
        raise OptionError(
            f"megacompile(): got device={value!r}; needed a 'cuda' device or 'cpu'"
        ) from None
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
