"""Checks of the options of `megacompile()`: each returns the value for `Options`, or raises."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import host_memory
from megacompile.errors import OptionError
from megacompile.option_values import Activations, Lowering, PlannedMesh, parse_bytes
from megacompile.runtime.optim.rules import RULES, listed, rule_of

_E = TypeVar("_E", bound=enum.Enum)
_F = TypeVar("_F", bound=Callable[..., Any])


class Given(NamedTuple):
    """An option as the user gave it."""

    name: str
    value: Any
    above: Mapping[str, Any]  # the options declared above it, already checked

    def wrong(self, needed: str) -> OptionError:
        """The error of a value that is not accepted."""
        return self.refused(f"; needed {needed}")

    def refused(self, why: str) -> OptionError:
        """The error of a value, with the text after it."""
        value = str(self.value) if isinstance(self.value, torch.device) else self.value
        return OptionError(f"megacompile(): got {self.name}={value!r}{why}")


# --- names


def by_name(function: _F) -> _F:
    """A decorator of `megacompile()`: an option that does not exist, or that comes without its
    name, raises an OptionError with the fix."""
    model, *names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        if len(args) > 1:
            raise OptionError(
                f"megacompile(): got {type(args[1]).__name__} by position; needed options by name, "
                f"such as device='cpu' or optimizer= ({listed(RULES, 'or')}, to update in the "
                "backward; without it optimizer.step() works with every optimizer)"
            )
        for name in (each for each in given if each not in (model, *names)):
            near = did_you_mean(name, names) or f"; needed one of {', '.join(names)}"
            raise OptionError(f"megacompile(): there is no option {name}={near}")
        return function(*args, **given)

    return cast("_F", checked)


def did_you_mean(value: Any, names: Sequence[str]) -> str:
    """ "; did you mean keep?", or "" if no name is close."""
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


# --- numbers, flags, words


def flag(given: Given) -> bool:
    """True or False."""
    if not isinstance(given.value, bool):
        raise given.wrong("True or False")
    return given.value


def open_flag(given: Given) -> bool | None:
    """True, False or None."""
    return None if given.value is None else flag(given)


def progress(given: Given) -> bool | None:
    """A flag, or None; False in all ranks of `mesh` but the first."""
    shown, mesh = open_flag(given), given.above["mesh"]
    is_other = isinstance(mesh, DeviceMesh) and mesh.get_rank() != int(mesh.mesh.flatten()[0])
    return False if is_other else shown


def count(given: Given, *, least: int = 1, words: str = "") -> int:
    """An int of at least `least`; `words`: other accepted values, for errors."""
    if type(given.value) is not int or given.value < least:
        raise given.wrong(f"{words}an int of at least {least}")
    return given.value


def slots(given: Given) -> int | None:
    """Enough slots for `lookahead`, or None."""
    if given.value is None:
        return None
    number, lookahead = count(given, least=2), given.above["lookahead"]
    if number < lookahead + 1:
        raise given.refused(
            f" with lookahead={lookahead}; a prefetch {lookahead} stages ahead needs at least "
            f"{lookahead + 1} slots; raise slots or lower lookahead"
        )
    return number


def tiles(given: Given) -> int | None:
    """A number of tiles; None: the plan decides."""
    return None if given.value == "auto" else count(given, words="'auto' or ")


def member(choices: type[_E]) -> Callable[[Given], _E]:
    """Make the check for a member of an enum, or its value."""

    def check(given: Given) -> _E:
        try:
            return choices(given.value)
        except ValueError:
            names = [each.value for each in choices]
            near = did_you_mean(given.value, names)
            raise given.wrong(f"one of {', '.join(map(repr, names))}{near}") from None

    return check


def lowering(given: Given) -> Lowering:
    """The backend of stages; None: chosen by the device."""
    if given.value is None:
        return Lowering.INDUCTOR if given.above["device"].type == "cuda" else Lowering.EAGER
    return member(Lowering)(given)


def dtype(name: str) -> torch.dtype | str:
    """The value of a dtype option, from its name in `option_values`."""
    found: torch.dtype | str = name if name == "int8" else getattr(torch, name)
    return found


def one_of(names: tuple[str, ...]) -> Callable[[Given], Any]:
    """Make the check for one of several dtypes, or None."""
    allowed = [dtype(name) for name in names]

    def check(given: Given) -> Any:
        if given.value is not None and given.value not in allowed:
            raise given.wrong("None or one of " + ", ".join(map(repr, allowed)))
        return given.value

    return check


# --- the device and the ranks


def device(given: Given) -> torch.device:
    """An existing device; a CUDA device has its index."""
    value, needed = given.value, "a 'cuda' device or 'cpu'"
    if value is None:
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if type(value) is int and 0 <= value < 128:  # torch keeps 8 bits: 256 is cuda:0
        value = f"cuda:{value}"
    if not isinstance(value, (str, torch.device)):
        raise given.wrong(f"{needed}, or the index of a CUDA device")
    try:
        found = torch.device(value)
    except RuntimeError:  # torch's message lists all its backends
        raise given.wrong(needed) from None
    if found.type == "cpu":
        return torch.device("cpu")
    given = given._replace(value=str(found))
    if found.type != "cuda":
        raise given.wrong(needed)
    if not torch.cuda.is_available():
        raise given.refused(
            ", but this machine has no CUDA device (torch.cuda.is_available() is False); use "
            "device='cpu' or leave it out"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        there = f", but there are {torch.cuda.device_count()} CUDA devices; use an index below that"
        raise given.refused(there)
    return torch.device("cuda", index)


def mesh(given: Given) -> DeviceMesh | PlannedMesh | None:
    """A mesh of the same device type, or None. Its last dimension shards; the first of two
    replicates."""
    mesh, device = given.value, given.above["device"]
    if mesh is None or isinstance(mesh, PlannedMesh):
        return mesh
    made = (
        f'init_device_mesh("{device.type}", (world_size,)), after '
        "torch.distributed.init_process_group()"
    )
    if not isinstance(mesh, DeviceMesh):
        raise given.wrong(f"a DeviceMesh: {made}")
    if not 1 <= mesh.ndim <= 2:
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.ndim} dimensions; needed one, which shards, or "
            "two: the first replicates, the second shards"
        )
    if mesh.ndim == 2 and mesh.size(1) == 1 < mesh.size(0):
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.size(0)} x 1 ranks, each of which would have the "
            "whole model; needed a second dimension of 2 or more; or leave out mesh=, and use "
            "DistributedDataParallel(megacompile(model))"
        )
    if mesh.device_type != device.type:
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.device_type!r} devices with "
            f"device={str(device)!r}; needed {made}"
        )
    if mesh.get_coordinate() is None:
        raise OptionError(
            f"megacompile(): rank {dist.get_rank()} is not in the mesh {mesh}; call megacompile() "
            "only in the ranks of the mesh"
        )
    return mesh


# --- memory


def device_size(given: Given, *, words: str = "") -> int | None:
    """Bytes of the device's memory, or None."""
    return _size(given, given.above["device"], words)


def host_size(given: Given) -> int | None:
    """Bytes of host memory, or None."""
    return _size(given, torch.device("cpu"), "")


def resident(given: Given) -> int | None:
    """Bytes for resident buckets; None: the plan decides."""
    if given.value == "auto":
        return None
    return sys.maxsize if given.value == "all" else device_size(given, words="'auto', 'all', ")


def _size(given: Given, place: torch.device, words: str) -> int | None:
    if given.value is None:
        return None
    total_bytes = 0
    if isinstance(given.value, float) and place.type == "cuda":
        total_bytes = int(torch.cuda.get_device_properties(place).total_memory)
    elif isinstance(given.value, float):
        total_bytes = host_memory.total_bytes()
    return parse_bytes(given.name, given.value, total_bytes, words=words)


# --- the update


def optimizer(given: Given) -> torch.optim.Optimizer | None:
    """An optimizer with an update in the backward, or None."""
    value = given.value
    if value is None:
        return None
    why_not = ""
    if isinstance(value, torch.optim.Optimizer) and (rule := rule_of(value)) is not None:
        why_not = rule.unsupported_reason(value)
        if not why_not:
            return value
    got = type(value).__name__ + (f" ({why_not})" if why_not else "")
    if isinstance(value, type):
        got = f"the class {value.__name__} (create it: {value.__name__}(model.parameters()))"
    raise OptionError(
        f"megacompile(): got optimizer={got}; needed one that can update in the backward: "
        f"{listed(RULES, 'or')}; or leave it out: optimizer.step() works with every optimizer"
    )


def device_update(given: Given) -> float | None:
    """A share for device updates, or None."""
    value, above = given.value, given.above
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1:  # nor nan
        raise given.wrong("None or a number from 0 to 1")
    given = given._replace(value=float(value))
    if value and above["optimizer"] is not None:
        raise given.refused(
            " with optimizer=..., which makes every update in the backward; leave one of them out"
        )
    if value and above["lowering"] is Lowering.EAGER:
        raise given.refused(
            " with lowering='eager', which updates with torch.optim itself; leave out "
            "device_update, or use lowering='inductor'"
        )
    if value and above["disk_weights"]:
        raise given.refused(
            " with disk_weights=True; the host updates parameters on a disk; leave one of them out"
        )
    return float(value)


# --- the disk

_NO_FOLDER = " without disk=; pass disk='/folder' too, or leave out"


def disk(given: Given) -> str | None:
    """The folder of scratch files, as an absolute path, or None."""
    if given.value is None:
        return None
    if isinstance(given.value, (str, os.PathLike)):
        path = os.path.abspath(os.fsdecode(given.value))
        given = given._replace(value=path)
        if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return path
    raise given.wrong("a folder that this process can write to, on a local disk")


def disk_memory(given: Given) -> int | None:
    """Bytes that may be used on the disk; None: the free space."""
    if given.value is None:
        return None
    folder = given.above["disk"]
    if folder is None:
        raise given.refused(f"{_NO_FOLDER} disk_memory")
    return parse_bytes(given.name, given.value, shutil.disk_usage(folder).free)


def disk_weights(given: Given) -> bool | None:
    """A flag, or None. True only where parameters can be on a disk."""
    asked, above = open_flag(given), given.above
    if asked and above["disk"] is None:
        raise given.refused(f"{_NO_FOLDER} disk_weights")
    if asked and above["compute_dtype"] is not None:
        raise given.refused(
            f" with compute_dtype={above['compute_dtype']}; float32 masters cannot be on a disk; "
            "leave out compute_dtype, or leave out disk_weights"
        )
    if asked and above["mesh"] is not None:
        raise given.refused(
            " with mesh=...; shards of parameters cannot be on a disk; leave one of them out "
            "(disk= alone stores optimizer states)"
        )
    return asked


def disk_saved(given: Given) -> bool | None:
    """A flag, or None. True only where saved tensors are offloaded."""
    asked, activations = open_flag(given), given.above["activations"]
    if asked and given.above["disk"] is None:
        raise given.refused(f"{_NO_FOLDER} disk_saved")
    if asked and activations not in (Activations.OFFLOAD, Activations.AUTO):
        raise given.refused(
            f" with activations={activations.value!r}; only offloaded tensors go on to a disk; use "
            "activations='offload', or leave out disk_saved"
        )
    return asked
