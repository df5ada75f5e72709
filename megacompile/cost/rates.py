"""Caches measured rates in files, so that each machine is measured once."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch

from megacompile import notices
from megacompile.cost.hardware import NAMES, Hardware, least, of_sheet
from megacompile.cost.probe import DiskRates, measure, measure_disk
from megacompile.errors import OptionError
from megacompile.progress import phase

_FORMAT = 8  # of the file; raised when fields or their meaning change
_DISK_FORMAT = 2


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
    with phase("measuring the machine's rates"):
        measured = measure(device)
    _keep(_file(device), json.dumps(asdict(measured), indent=2))
    if again and device.type == "cuda":
        _forget_of_ranks(device)
    return measured


def cached(device: torch.device) -> Hardware | None:
    """The cached figures of `device`, if they are valid."""
    return _on_file(_file(device))


def _on_file(path: Path | None) -> Hardware | None:
    try:
        if path is None or not path.is_file():  # opening a FIFO would block
            return None
        found = Hardware(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if _are_figures(found) else None


def cached_of_rank(device: torch.device, ranks: int) -> Hardware | None:
    """The cached figures of one of `ranks` GPUs of this host that were measured together."""
    return _on_file(_file_of_rank(device, ranks))


def measure_of_rank(device: torch.device, ranks: int, meet: Callable[[], object]) -> Hardware:
    """Measure this GPU while the other ranks of this host measure theirs, and cache the result.

    Args:
        meet: a barrier of all ranks, called equally often in each.
    """
    with phase("measuring the machine's rates"):
        measured = measure(device, meet=meet)
    _keep(_file_of_rank(device, ranks), json.dumps(asdict(measured), indent=2))
    return measured


def _are_figures(hardware: Hardware) -> bool:
    """True if every figure is plausible: 0, NaN and text are not."""
    for field in fields(hardware):
        value = getattr(hardware, field.name)
        if field.name == "name":
            if not isinstance(value, str):
                return False
            continue
        if value is None and field.default is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if not value >= least(field.name) or (math.isinf(value) and field.default != math.inf):
            return False
    return True


def load_disk(folder: str | os.PathLike[str], *, again: bool = False) -> DiskRates:
    """The measured rates of a folder's disk, cached as in `load`.

    Args:
        again: measure even if that was done before.

    Raises:
        DiskError: no file can be created there, or it cannot be read or written.
    """
    path = _disk_file(Path(folder))
    found = None if again else disk_on_file(folder)
    if found is None:
        with phase("measuring the disk's rates"):
            found = measure_disk(folder)
        _keep(path, json.dumps(asdict(found), indent=2))
    return found


def disk_on_file(folder: str | os.PathLike[str]) -> DiskRates | None:
    """The cached rates of a folder's disk; None if there are no valid ones."""
    path = _disk_file(Path(folder))
    try:
        found = DiskRates(**json.loads(path.read_text())) if path and path.is_file() else None
    except (OSError, ValueError, TypeError):
        return None
    if found is None:
        return None
    values = asdict(found).values()
    return found if all(type(v) is float and 0 < v < math.inf for v in values) else None


def _disk_file(folder: Path) -> Path | None:
    """The cache file for a disk of this machine, because machines may share a cache."""
    cache = _cache()
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None  # measuring reports the error
    where = f"{_words(platform.node())}-{os.major(device)}-{os.minor(device)}"
    return None if cache is None else cache / f"disk-{where}-v{_DISK_FORMAT}.json"


def _keep(path: Path | None, text: str) -> None:
    """Write a cache file atomically, or warn if that fails."""
    try:
        if path is None:
            raise OSError("no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        notices.warn(
            f"megacompile: the machine's rates cannot be cached ({error}), so each process "
            "measures them; set XDG_CACHE_HOME to a writable directory",
            notices.Whose.HOST,
        )


def _file(device: torch.device) -> Path | None:
    folder = _cache()
    return None if folder is None else folder / f"{_key(device)}.json"


def _file_of_rank(device: torch.device, ranks: int | str) -> Path | None:
    """One file for each GPU of each machine: GPUs of the same model differ, and machines may share
    a home."""
    folder = _cache()
    which = f"{_words(platform.node())}-{torch.cuda.get_device_properties(device).uuid}"
    name = f"{_key(device)}-{which}-of-{ranks}.json"
    return None if folder is None else folder / name


def _forget_of_ranks(device: torch.device) -> None:
    """Remove the figures of this GPU measured together with any number of others."""
    files = _file_of_rank(device, "*")
    for path in () if files is None else files.parent.glob(files.name):
        path.unlink(missing_ok=True)


def _words(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()  # of host updates
    return f"{name.lower().replace(' ', '-')}-{threads}-torch-{torch.__version__}-v{_FORMAT}"


def _cache() -> Path | None:
    """The cache folder; None without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "megacompile"
    except RuntimeError:  # an unknown user without HOME
        return None


# Machines by name: a measured one, data sheets of others, and this machine.


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
