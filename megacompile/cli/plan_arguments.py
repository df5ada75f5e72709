"""The options of the command `plan`, read and checked without torch.

Sizes may be fractions of the machine's memory. This machine's memory is unknown without torch, so
its options are checked as if it had 1 TiB and parsed again with its real size.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
from dataclasses import dataclass

from megacompile.cli import source
from megacompile.cost.hardware import ASSUMED_NETWORK_GB_S, NAMES, Hardware, of_sheet
from megacompile.errors import MissingExtraError, OptionError
from megacompile.option_values import COMPUTE_DTYPES, STATE_DTYPES, Activations, parse_bytes

DESCRIPTION = """Plan the training of a model on a machine that you need not have.

TARGET is a Hugging Face config of a causal language model (a folder with a config.json, or a json
file), or package.module:function. The function returns a module, or (module, args, kwargs). It gets
the arguments `batch` and `seq` if it takes them. The model is built on the meta device, without
memory, weights or a GPU. A module alone gets token ids (batch, seq) and should return its loss.

    python -m megacompile plan examples/configs/qwen2.5-72b.json --gpu h200 --host-memory 1.5TB

Exit code: 0 if it fits, 1 if it does not, 2 if it cannot be planned. A model that lacks less than
a tenth of the device's memory does not fit, but megacompile() tries it anyway; the answer says so.
"""

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # number of states
DTYPES = ("bfloat16", "float16", "float32")
STATES = (*STATE_DTYPES, "same")
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's recipes

_LEAST_BYTES = 2**20  # of a size without a unit


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="a config (folder or json), or package.module:function")
    add("--gpu", default="h200", help=f"{', '.join(NAMES)}; default: h200")
    default = "default: the GPU's, less 5 %% (4 GiB at most)"
    add("--gpus", type=int, default=1, metavar="N", help="GPUs of one host that share the model")
    add(
        "--interconnect",
        type=float,
        metavar="GB/S",
        help="bandwidth from the other GPUs to one, with --gpus; default: the GPU's NVLink. "
        "A rate no faster than the link to the host is assumed to share that link",
    )
    add(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="hosts that replicate the model, each with --gpus (a mesh of two dimensions)",
    )
    add(
        "--network",
        type=float,
        metavar="GB/S",
        help="bandwidth from other hosts to one GPU while all GPUs communicate, with --hosts; "
        f"default: {ASSUMED_NETWORK_GB_S:g}, 100 Gbit/s each",
    )
    add(
        "--link",
        metavar="GB/S",
        help="between host and GPU, one direction at a time: about 25 for PCIe 4 x16, 12 for x8; "
        "default: the GPU's",
    )
    add("--gpu-memory", metavar="SIZE", help=f"20GiB, or 0.5 of it; {default}")
    add(
        "--host-memory",
        metavar="SIZE",
        help="1.5TB, 128GiB, used in full, as by megacompile(model, host_memory=SIZE); "
        "default: unknown, or all of this machine's",
    )
    add(
        "--page-locked",
        metavar="SIZE",
        help="host memory that the system can lock for copies: 1GiB for WSL 2; 0 for containers "
        "that lock none; default: all",
    )
    add("--disk", metavar="PATH", help="this folder's disk may hold what the host does not")
    add("--disk-memory", metavar="SIZE", help="200GiB, for all GPUs; default: the free space")
    add("--disk-weights", action="store_true", help="megacompile(model, disk_weights=True)")
    add("--disk-saved", action="store_true", help="megacompile(model, disk_saved=True)")
    add(
        "--disk-rates",
        metavar="R/W",
        help="2.2/2.2: GB/s of reads and writes alone; together each has half; "
        "default: measured by `hardware --disk PATH`",
    )
    add(
        "--batch",
        type=int,
        default=16,
        metavar="N",
        help="sequences per step and GPU; default: 16",
    )
    add("--seq", type=int, default=1024, metavar="N", help="tokens per sequence; default: 1024")
    add("--sweep", choices=["batch"], help="find the batch with the most tokens/s: 1, 2, 4, ...")
    add("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="default: adamw")
    add(
        "--state-dtype",
        choices=STATES,
        default="float32",
        help="of the optimizer's moments; same: the parameters'; default: float32",
    )
    add("--update-in-backward", action="store_true", help="megacompile(model, optimizer=...)")
    add("--dtype", choices=[*DTYPES], help="of the parameters; default: bfloat16 for a config")
    add("--compute-dtype", choices=COMPUTE_DTYPES, help="of streamed copies of float32 masters")
    add("--float8", choices=FLOAT8, help="torchao's recipe for all linear layers except the head")
    add("--activations", choices=[each.value for each in Activations], default="auto")
    add("--tiles", type=int, metavar="N", help="megacompile(model, tiles=N); default: auto")
    add(
        "--tokens",
        type=float,
        default=1e12,
        metavar="N",
        help="show the time for this many tokens; default: 1e12",
    )
    add("--changes", action="store_true", help="also try other plans and show what would help most")
    add("--json", action="store_true", help="print JSON")


def check(args: argparse.Namespace) -> None:
    """Check the options before torch is imported.

    Raises:
        OptionError: an invalid option or target.
    """
    for name in ("batch", "seq", "tokens", "gpus", "hosts", "tiles"):
        value = getattr(args, name)
        if value is not None and not value >= 1:
            raise OptionError(f"--{name} {value}: needed 1 or more")
    gpu = args.gpu.lower()
    if gpu not in NAMES:
        raise OptionError(f"--gpu {args.gpu}: needed one of {', '.join(NAMES)}")
    if args.interconnect is not None and not (args.interconnect > 0 and args.gpus > 1):
        raise OptionError(
            f"--interconnect {args.interconnect:g}: needed GB/s, more than 0, and --gpus 2 or more"
        )
    if args.hosts > 1 and args.gpus == 1:
        raise OptionError(
            f"--hosts {args.hosts}: needed --gpus 2 or more, which share the model on each host"
        )
    if args.network is not None and not (0 < args.network < math.inf and args.hosts > 1):
        raise OptionError(
            f"--network {args.network:g}: needed GB/s, more than 0, and --hosts 2 or more"
        )
    hardware = of_sheet(gpu)  # None: this machine, which needs torch
    if args.float8 is not None:
        _check_float8(args, hardware)
    if hardware is None:
        machine(args, device_bytes=2**40, host_bytes=2**40)
    else:
        machine(args, device_bytes=hardware.device_bytes, host_bytes=hardware.host_bytes)
    _check_on_disk(args)
    source.check(args.target, seq=args.seq)


def _check_on_disk(args: argparse.Namespace) -> None:
    """Check which tensors may be on a disk, as `megacompile()` does."""
    asked = {"--disk-weights": args.disk_weights, "--disk-saved": args.disk_saved}
    for name in [name for name, value in asked.items() if value and args.disk is None]:
        raise OptionError(f"{name}: needed the disk's folder: --disk PATH")
    if args.disk_weights and args.compute_dtype is not None:
        raise OptionError("--disk-weights: masters (--compute-dtype) cannot be on a disk")
    if args.disk_weights and args.gpus > 1:
        raise OptionError("--disk-weights: shards of parameters (--gpus) cannot be on a disk")
    if args.disk_saved and args.activations not in ("auto", "offload"):
        raise OptionError(
            f"--disk-saved: with --activations {args.activations} nothing waits on the host; "
            "needed auto or offload"
        )


def _check_float8(args: argparse.Namespace, hardware: Hardware | None) -> None:
    if isinstance(source.parse(args.target), source.Function):
        raise OptionError(
            f"--float8 {args.float8}: only for configs; call convert_to_float8_training in the "
            "function"
        )
    if hardware is not None and hardware.matmul8_tflop_s is None:
        raise OptionError(
            f"--float8 {args.float8}: the {hardware.name} has no fp8; needed --gpu h100, h200 or "
            "4090"
        )
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtraError("--float8 needs torchao: pip install torchao")


@dataclass(frozen=True, slots=True)
class DiskArguments:
    """Options about a disk."""

    folder: str
    free_bytes: int
    rates: tuple[float, float] | None  # GB/s read and written; None: use measured rates


@dataclass(frozen=True, slots=True)
class MachineArguments:
    """Options about a machine; None if not given."""

    link_gb_s: float | None  # one direction at a time
    device_bytes: int | None
    host_bytes: int | None
    locked_bytes: int | None  # that the system can lock for copies
    disk: DiskArguments | None


def machine(
    args: argparse.Namespace, *, device_bytes: int | None, host_bytes: int | None
) -> MachineArguments:
    """Parse the options about a machine.

    Args:
        device_bytes, host_bytes: of the machine, for sizes given as fractions; None: unknown.

    Raises:
        OptionError: an invalid size or rate, a fraction of an unknown size, or a missing disk
            folder without its size and rates.
    """
    host = _size("--host-memory", args.host_memory, host_bytes, "128GiB")
    locked: int | None = 0
    if args.page_locked != "0":
        locked = _size("--page-locked", args.page_locked, host or host_bytes, "1GiB")
    return MachineArguments(
        link_gb_s=_link(args.link),
        device_bytes=_size("--gpu-memory", args.gpu_memory, device_bytes, "20GiB"),
        host_bytes=host,
        locked_bytes=locked,
        disk=_disk(args),
    )


def _disk(args: argparse.Namespace) -> DiskArguments | None:
    given = {"--disk-memory": args.disk_memory, "--disk-rates": args.disk_rates}
    if args.disk is None:
        for name, value in given.items():
            if value is not None:
                raise OptionError(f"{name} {value}: needed the disk's folder: --disk PATH")
        return None
    there = os.path.isdir(args.disk)
    missing = [name for name, value in given.items() if value is None]
    if not there and missing:
        raise OptionError(
            f"--disk {args.disk}: no such folder; needed one or, for another machine's disk, "
            f"{' and '.join(missing)}"
        )
    free = shutil.disk_usage(args.disk).free if there else 0
    size = _size("--disk-memory", args.disk_memory, free if there else None, "200GiB")
    free = free if size is None else size
    return DiskArguments(os.path.abspath(args.disk), free, _rates(args.disk_rates))


def _rates(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        read, write = (float(part) for part in text.split("/"))
    except ValueError:
        read = write = 0.0
    if not (0 < read < math.inf and 0 < write < math.inf):
        raise OptionError(f"--disk-rates {text}: needed GB/s of reads and writes, such as 2.2/2")
    return read, write


def _link(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise OptionError(f"--link {text}: needed GB/s between host and GPU, such as 25")
    return rate


def _size(name: str, text: str | None, total_bytes: int | None, example: str) -> int | None:
    """Parse a size in bytes or as a fraction of `total_bytes` (None: unknown)."""
    if text is None:
        return None
    if _is_fraction(text) and not total_bytes:
        raise OptionError(f"{name} {text}: a fraction of an unknown size; pass a size: {example}")
    try:
        size = parse_bytes(name, float(text) if _is_fraction(text) else text, total_bytes or 0)
    except OptionError:
        size = 0
    unitless = text.replace(".", "").isdigit() and not _is_fraction(text)
    if size <= 0 or (unitless and size < _LEAST_BYTES):  # 1.5 is not one byte and a half
        raise OptionError(f"{name} {text}: needed a size such as 20GiB, or a fraction such as 0.5")
    return size


def _is_fraction(text: str) -> bool:
    try:
        return "." in text and 0 < float(text) <= 1
    except ValueError:
        return False
