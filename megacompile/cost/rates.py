"""Measured rates in a file, so that a machine is measured once."""

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

_FORMAT = 8  # of the file: raised when fields change, or what they mean
_DISK_FORMAT = 2


def load(device: torch.device | str, *, again: bool = False) -> Hardware:
    """The measured figures of `device`, from the cache file if it was measured before.

    The file is of this device, this number of threads, this version of torch and this version of
    the format; one that cannot be read is written again.

    Args:
        again: measure even if that was done before: something else may have used the device then.
            Ranks that share a model measure it again, too.
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
    """The figures of `device` if it was measured before, and they are figures."""
    return _on_file(_file(device))


def _on_file(path: Path | None) -> Hardware | None:
    try:
        if path is None or not path.is_file():  # to open a FIFO would wait for ever
            return None
        found = Hardware(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if _are_figures(found) else None


def cached_of_rank(device: torch.device, ranks: int) -> Hardware | None:
    """The figures of one of `ranks` GPUs of this host, if they were measured together before."""
    return _on_file(_file_of_rank(device, ranks))


def measure_of_rank(device: torch.device, ranks: int, *, meet: Callable[[], object]) -> Hardware:
    """Measure this GPU while the other ranks of this host measure theirs, and keep it.

    Args:
        meet: waits until all ranks are here; called as often in each of them.
    """
    with phase("measuring the machine's rates"):
        measured = measure(device, meet=meet)
    _keep(_file_of_rank(device, ranks), json.dumps(asdict(measured), indent=2))
    return measured


def _are_figures(hardware: Hardware) -> bool:
    """Is every figure a number that there can be? 0, NaN and text are in no measurement."""
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
    """The measured rates of the disk that a folder is on, from the cache file as `load` does.

    Args:
        again: measure even if that was done before.

    Raises:
        DiskError: no file can be made there, or it cannot be read or written.
    """
    path = _disk_file(Path(folder))
    found = None if again else disk_on_file(folder)
    if found is None:
        with phase("measuring the disk's rates"):
            found = measure_disk(folder)
        _keep(path, json.dumps(asdict(found), indent=2))
    return found


def disk_on_file(folder: str | os.PathLike[str]) -> DiskRates | None:
    """The measured rates of the disk that a folder is on; None: none that can be used."""
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
    """The file for this machine and this device: folders of many machines may have the same
    name."""
    cache = _cache()
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None  # to measure says what is wrong
    where = f"{_words(platform.node())}-{os.major(device)}-{os.minor(device)}"
    return None if cache is None else cache / f"disk-{where}-v{_DISK_FORMAT}.json"


def _keep(path: Path | None, text: str) -> None:
    """Write the cache file as a whole, or say that there is none."""
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        notices.warn(
            f"megacompile: the machine's rates cannot be kept ({error}), and are measured anew by "
            "each process; set XDG_CACHE_HOME to a directory that can be written",
            notices.Whose.HOST,
        )


def _file(device: torch.device) -> Path | None:
    folder = _cache()
    return None if folder is None else folder / f"{_key(device)}.json"


def _file_of_rank(device: torch.device, ranks: int | str) -> Path | None:
    """One for each GPU of each machine: GPUs of one name differ, and machines may share a home."""
    folder = _cache()
    which = f"{_words(platform.node())}-{torch.cuda.get_device_properties(device).uuid}"
    name = f"{_key(device)}-{which}-of-{ranks}.json"
    return None if folder is None else folder / name


def _forget_of_ranks(device: torch.device) -> None:
    """Remove the figures of this GPU as one of several, however many."""
    files = _file_of_rank(device, "*")
    for path in () if files is None else files.parent.glob(files.name):
        path.unlink(missing_ok=True)


def _words(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()  # that the update on the host has
    return f"{name.lower().replace(' ', '-')}-{threads}-torch-{torch.__version__}-v{_FORMAT}"


def _cache() -> Path | None:
    """The folder where rates are kept; None where there is no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "megacompile"
    except RuntimeError:  # an unknown user, and no HOME
        return None


# Machines by name: one that was measured, data sheets of others, and the one at hand.


def known(name: str) -> Hardware:
    """A machine by name: h200 (measured), h100, a100, 4090, 3090, 3080 (data sheets), this.

    "this" is the machine at hand, measured once. How much memory a host has is not known but of
    this one: `known("4090").replace(host_bytes=128 * 2**30)`.

    Raises:
        OptionError: a name that is not among them.
    """
    key = name.lower() if isinstance(name, str) else name
    if key == "this":
        return load("cuda" if torch.cuda.is_available() else "cpu")
    found = of_sheet(key)
    if found is None:
        raise OptionError(
            f"known(): got {name!r}; needed one of {', '.join(NAMES)}; or make a "
            "megacompile.cost.hardware.Hardware of your own figures"
        )
    return found
