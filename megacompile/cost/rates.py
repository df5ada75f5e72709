"""Caches measured rates in files, so that each machine is measured once, and finds machines by
name."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import torch

from megacompile import notices
from megacompile.cost.hardware import NAMES, Hardware, least, of_sheet
from megacompile.cost.probe import DiskRates, measure, measure_disk
from megacompile.errors import OptionError
from megacompile.progress import phase

_FORMAT = 8  # of the file; raised when fields or their meaning change
_DISK_FORMAT = 2
_MEASURING = "measuring the machine's rates"

_Rates = TypeVar("_Rates", Hardware, DiskRates)


def load(device: torch.device | str, *, again: bool = False) -> Hardware:
    """The measured figures of `device`, from the cache if it was measured before.

    The cache file depends on the device, the number of threads, torch's version and the version of
    the format. An unreadable file is replaced.

    Args:
        again: measure even if cached, for example because the device was busy then. Ranks that
            share a model measure it again too.
    """
    device = torch.device(device)
    found = None if again else cached(device)
    if found is not None:
        return found
    with phase(_MEASURING):
        measured = measure(device)
    _keep(_file(device), measured)
    if again and device.type == "cuda":
        of_ranks = _file_of_rank(device, "*")
        for path in () if of_ranks is None else of_ranks.parent.glob(of_ranks.name):
            path.unlink(missing_ok=True)
    return measured


def cached(device: torch.device) -> Hardware | None:
    """The cached figures of `device`, if they are valid."""
    return _kept(_file(device), Hardware)


def cached_of_rank(device: torch.device, ranks: int) -> Hardware | None:
    """The cached figures of one of `ranks` GPUs of this host that were measured together."""
    return _kept(_file_of_rank(device, ranks), Hardware)


def measure_of_rank(device: torch.device, ranks: int, meet: Callable[[], object]) -> Hardware:
    """Measure this GPU while the other ranks of this host measure theirs, and cache the result.

    Args:
        meet: a barrier of all ranks, called equally often in each.
    """
    with phase(_MEASURING):
        measured = measure(device, meet=meet)
    _keep(_file_of_rank(device, ranks), measured)
    return measured


def load_disk(folder: str | os.PathLike[str], *, again: bool = False) -> DiskRates:
    """The measured rates of a folder's disk, cached as in `load`.

    Args:
        again: measure even if that was done before.

    Raises:
        DiskError: no file can be created there, or it cannot be read or written.
    """
    path = _disk_file(Path(folder))
    found = None if again else _kept(path, DiskRates)
    if found is None:
        with phase("measuring the disk's rates"):
            found = measure_disk(folder)
        _keep(path, found)
    return found


def disk_on_file(folder: str | os.PathLike[str]) -> DiskRates | None:
    """The cached rates of a folder's disk; None if there are no valid ones."""
    return _kept(_disk_file(Path(folder)), DiskRates)


def _kept(path: Path | None, kind: type[_Rates]) -> _Rates | None:
    """The rates in a file; None if it is absent, of another format or has impossible figures."""
    try:
        if path is None or not path.is_file():  # opening a FIFO would block
            return None
        found = kind(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    for field in fields(kind):
        value = getattr(found, field.name)
        if field.name == "name":
            valid = isinstance(value, str)
        elif value is None:
            valid = field.default is None
        else:
            valid = type(value) in (int, float) and value >= least(field.name)
            valid = valid and (math.isfinite(value) or field.default == math.inf)
        if not valid:
            return None
    return found


def _keep(path: Path | None, rates: Hardware | DiskRates) -> None:
    """Write a cache file atomically, or warn if that fails."""
    try:
        if path is None:
            raise OSError("no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(rates), file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        notices.warn(
            f"megacompile: the machine's rates cannot be cached ({error}), so each process "
            "measures them; set XDG_CACHE_HOME to a writable directory",
            notices.Whose.HOST,
        )


def _file(device: torch.device) -> Path | None:
    return _cached_as(_key(device))


def _file_of_rank(device: torch.device, ranks: int | str) -> Path | None:
    """One file for each GPU of each machine: GPUs of the same model differ, and machines may share
    a home."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return _cached_as(f"{_key(device)}-{_host()}-{uuid}-of-{ranks}")


def _disk_file(folder: Path) -> Path | None:
    """The cache file for a disk of this machine, because machines may share a cache."""
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None  # measuring reports the error
    name = f"disk-{_host()}-{os.major(device)}-{os.minor(device)}-v{_DISK_FORMAT}"
    return _cached_as(name)


def _host() -> str:
    return "".join(c if c.isalnum() else "-" for c in platform.node().lower())


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()  # of host updates
    return f"{name.lower().replace(' ', '-')}-{threads}-torch-{torch.__version__}-v{_FORMAT}"


def _cached_as(name: str) -> Path | None:
    """The path of a cache file; None without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # an unknown user without HOME
        return None
    return folder / "megacompile" / f"{name}.json"


def known(name: str) -> Hardware:
    """A machine by name: h200 (measured), h100, a100, 4090, 3090, 3080 (data sheets), this.

    "this" is the current machine, measured once. Host memory is only known for this one; set it for
    others: `known("4090").replace(host_bytes=128 * 2**30)`.

    Raises:
        OptionError: an unknown name.
    """
    key = name.lower() if isinstance(name, str) else name
    if key == "this":
        return load("cuda" if torch.cuda.is_available() else "cpu")
    found = of_sheet(key)
    if found is None:
        raise OptionError(
            f"known(): got {name!r}; needed one of {', '.join(NAMES)}; or pass a "
            "megacompile.cost.hardware.Hardware with your own figures"
        )
    return found
