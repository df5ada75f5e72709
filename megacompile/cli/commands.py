"""Declares the commands of the command line: their help, options and checks.

Nothing here imports torch, so that `--help` and errors appear at once. The work of a command is
`run(args)` in the module of its name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from megacompile.cli import source
from megacompile.cost.hardware import ASSUMED_NETWORK_GB_S, NAMES, of_sheet
from megacompile.errors import MissingExtraError, OptionError
from megacompile.option_values import COMPUTE_DTYPES, STATE_DTYPES, Activations, parse_bytes

TRACED = 3  # the step that `demo` traces, after everything is compiled
OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # number of states
DTYPES = ("bfloat16", "float16", "float32")
_FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's recipes
_SAVED = (".json", ".png", ".svg", ".pdf")
_LEAST_BYTES = 2**20  # of a size without a unit


@dataclass(frozen=True, slots=True)
class Command:
    """The parts of a command that need no torch."""

    name: str  # its `run` is in the module `{name}_command`
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None] = lambda args: None  # raises OptionError


def print_json(value: Any) -> None:
    """Print JSON on stdout."""
    print(json.dumps(value, indent=2))


# --- values of options


def _at_least(least: int, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text}: needed {least} or more")

    return parse


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise argparse.ArgumentTypeError(f"{text}: needed GB/s, such as 25")


def _rates(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
        read, write = map(_rate, text.split("/"))
        return read, write
    raise argparse.ArgumentTypeError(f"{text}: needed GB/s of reads and writes, such as 2.2/2")


def _size(text: str) -> int | float:
    """Bytes, or as a float a fraction of the machine's memory."""
    with contextlib.suppress(ValueError):
        if "." in text and 0 < float(text) <= 1:
            return float(text)
    with contextlib.suppress(OptionError):
        size = parse_bytes("size", text, 0)
        unitless = text.replace(".", "").isdigit()
        if size >= (_LEAST_BYTES if unitless else 1):  # 1.5 is not one byte and a half
            return size
    raise argparse.ArgumentTypeError(
        f"{text}: needed a size such as 20GiB, or a fraction such as 0.5"
    )


def _size_or_0(text: str) -> int | float:
    return 0 if text == "0" else _size(text)


def _saved(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _SAVED:
        known = ", ".join(_SAVED)
        raise argparse.ArgumentTypeError(f"{text}: got the suffix {path.suffix!r}; needed {known}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder: {str(path.parent)!r}")
    return path


def _add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save",
        metavar="FILE",
        action="append",
        type=_saved,
        default=[],
        help="write the trace: .json for ui.perfetto.dev and chrome://tracing, .png, .svg or .pdf "
        "for a picture (needs matplotlib); may be given several times",
    )


# --- demo


def _demo_options(parser: argparse.ArgumentParser) -> None:
    add, some = parser.add_argument, _at_least(1)
    add("--steps", type=_at_least(TRACED), default=30, help=f"{TRACED} or more; default: 30")
    add("--layers", type=some, default=4)
    add("--width", type=some, default=128, help="a multiple of 32; default: 128")
    add("--batch", type=some, default=8, help="sequences of 128 bytes; default: 8")
    add("--device", help="cuda:0, cpu; default: the GPU if there is one")
    add("--code", action="store_true", help="print the schedule's Python too")
    _add_save(parser)
    add("--json", action="store_true", help="print losses and totals as JSON")


def _check_demo(args: argparse.Namespace) -> None:
    if args.width % 32:
        raise OptionError(f"--width {args.width}: needed a multiple of 32")


# --- trace


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m megacompile trace [options] SCRIPT [arguments of the script]"
    parser.add_argument(
        "--step",
        type=_at_least(1),
        default=3,
        metavar="N",
        help="trace the step that ends with the N-th call of optimizer.step(); default: 3, "
        "because the first two compile",
    )
    _add_save(parser)
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--go-on", action="store_true", help="run the script to its end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python file, a module (with -m), or a .json file that --save wrote",
    )
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def _check_trace(args: argparse.Namespace) -> None:
    if args.module:
        _check_module(args.script)
    elif not Path(args.script).is_file():
        raise OptionError(f"no such file: {args.script!r} (for a module, use -m)")


def _check_module(name: str) -> None:
    """Check that `python -m` can run a module. Imports the packages that contain it."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = _spec(name)
        if found is not None and found.submodule_search_locations is not None:  # a package
            found = _spec(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    if found is None:
        raise OptionError(
            f"-m {name}: no such module that can be run (a package needs a __main__.py); run the "
            "command where `import` finds it, or pass a file without -m"
        )


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: "a..b", ""
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise  # a containing package fails to import something else
        return None


# --- plan

_PLAN = """Plan the training of a model on a machine that you need not have.

TARGET is a Hugging Face config of a causal language model (a folder with a config.json, or a json
file), or package.module:function. The function returns a module, or (module, args, kwargs). It gets
the arguments `batch` and `seq` if it takes them. The model is built on the meta device, without
memory, weights or a GPU. A module alone gets token ids (batch, seq) and should return its loss.

    python -m megacompile plan examples/configs/qwen2.5-72b.json --gpu h200 --host-memory 1.5TB

Exit code: 0 if it fits, 1 if it does not, 2 if it cannot be planned. A model that lacks less than
a tenth of the device's memory does not fit, but megacompile() tries it anyway; the answer says so.
"""


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add, some = parser.add_argument, _at_least(1)
    add("target", metavar="TARGET", help="a config (folder or json), or package.module:function")
    add("--gpu", type=str.lower, choices=NAMES, default="h200", help="default: h200")
    help = "GPUs of one host that share the model"
    add("--gpus", type=some, default=1, metavar="N", help=help)
    help = (
        "bandwidth from the other GPUs to one, with --gpus; default: the GPU's NVLink. A rate no "
        "faster than the link to the host is assumed to share that link"
    )
    add("--interconnect", type=_rate, metavar="GB/S", help=help)
    help = "hosts that replicate the model, each with --gpus (a mesh of two dimensions)"
    add("--hosts", type=some, default=1, metavar="N", help=help)
    help = (
        "bandwidth from other hosts to one GPU while all GPUs communicate, with --hosts; "
        f"default: {ASSUMED_NETWORK_GB_S:g}, 100 Gbit/s each"
    )
    add("--network", type=_rate, metavar="GB/S", help=help)
    help = (
        "between host and GPU, one direction at a time: about 25 for PCIe 4 x16, 12 for x8; "
        "default: the GPU's"
    )
    add("--link", type=_rate, metavar="GB/S", help=help)
    help = "20GiB, or 0.5 of it; default: the GPU's, less 5 %% (4 GiB at most)"
    add("--gpu-memory", type=_size, metavar="SIZE", help=help)
    help = (
        "1.5TB, 128GiB, used in full, as by megacompile(model, host_memory=SIZE); "
        "default: unknown, or all of this machine's"
    )
    add("--host-memory", type=_size, metavar="SIZE", help=help)
    help = (
        "host memory that the system can lock for copies: 1GiB for WSL 2; 0 for containers that "
        "lock none; default: all"
    )
    add("--page-locked", type=_size_or_0, metavar="SIZE", help=help)
    add("--disk", metavar="PATH", help="this folder's disk may hold what the host does not")
    help = "200GiB, for all GPUs; default: the free space"
    add("--disk-memory", type=_size, metavar="SIZE", help=help)
    add("--disk-weights", action="store_true", help="megacompile(model, disk_weights=True)")
    add("--disk-saved", action="store_true", help="megacompile(model, disk_saved=True)")
    help = (
        "2.2/2.2: GB/s of reads and writes alone; together each has half; "
        "default: measured by `hardware --disk PATH`"
    )
    add("--disk-rates", type=_rates, metavar="R/W", help=help)
    help = "sequences per step and GPU; default: 16"
    add("--batch", type=some, default=16, metavar="N", help=help)
    add("--seq", type=some, default=1024, metavar="N", help="tokens per sequence; default: 1024")
    add("--sweep", choices=["batch"], help="find the batch with the most tokens/s: 1, 2, 4, ...")
    add("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="default: adamw")
    help = "of the optimizer's moments; same: the parameters'; default: float32"
    add("--state-dtype", choices=(*STATE_DTYPES, "same"), default="float32", help=help)
    add("--update-in-backward", action="store_true", help="megacompile(model, optimizer=...)")
    add("--dtype", choices=DTYPES, help="of the parameters; default: bfloat16 for a config")
    add("--compute-dtype", choices=COMPUTE_DTYPES, help="of streamed copies of float32 masters")
    add("--float8", choices=_FLOAT8, help="torchao's recipe for all linear layers except the head")
    add("--activations", choices=[each.value for each in Activations], default="auto")
    add("--tiles", type=some, metavar="N", help="megacompile(model, tiles=N); default: auto")
    help = "show the time for this many tokens; default: 1e12"
    add("--tokens", type=_at_least(1, float), default=1e12, metavar="N", help=help)
    add("--changes", action="store_true", help="also try other plans and show what would help most")
    add("--json", action="store_true", help="print JSON")


def _check_plan(args: argparse.Namespace) -> None:
    if (args.interconnect or args.hosts > 1) and args.gpus == 1:
        raise OptionError("--interconnect, --hosts: needed --gpus 2 or more, which share the model")
    if args.network and args.hosts == 1:
        raise OptionError("--network: needed --hosts 2 or more")
    if args.float8 is not None:
        _check_float8(args)
    _check_disk(args)
    source.check(args.target, seq=args.seq)


def _check_float8(args: argparse.Namespace) -> None:
    hardware = of_sheet(args.gpu)  # None: this machine
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


def _check_disk(args: argparse.Namespace) -> None:
    named = {"--disk-memory": args.disk_memory, "--disk-rates": args.disk_rates}
    given = {**named, "--disk-weights": args.disk_weights, "--disk-saved": args.disk_saved}
    if args.disk is None:
        for name in (name for name, value in given.items() if value):
            raise OptionError(f"{name}: needed the disk's folder: --disk PATH")
        return
    missing = [name for name, value in named.items() if value is None]
    if missing and not os.path.isdir(args.disk):
        raise OptionError(
            f"--disk {args.disk}: no such folder; needed one or, for another machine's disk, "
            f"{' and '.join(missing)}"
        )
    if args.disk_weights and args.compute_dtype is not None:
        raise OptionError("--disk-weights: masters (--compute-dtype) cannot be on a disk")
    if args.disk_weights and args.gpus > 1:
        raise OptionError("--disk-weights: shards of parameters (--gpus) cannot be on a disk")
    if args.disk_saved and args.activations not in ("auto", "offload"):
        raise OptionError(
            f"--disk-saved: with --activations {args.activations} nothing waits on the host; "
            "needed auto or offload"
        )


# --- hardware


def _hardware_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--disk", metavar="PATH", help="also measure the disk of this folder")
    parser.add_argument("--again", action="store_true", help="measure even if rates are cached")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = (
    Command(
        "demo",
        "train a small model and show its schedule and trace",
        """Train a small GPT on the source of this package and show what runs.

Prints the losses, the schedule as a table of steps by streams, and a trace of one step.""",
        _demo_options,
        _check_demo,
    ),
    Command(
        "plan",
        "find out if a model fits on a machine and how fast it trains",
        _PLAN,
        _plan_options,
        _check_plan,
    ),
    Command(
        "trace",
        "trace a training step of a script",
        """Run a training script and trace one step of its megacompiled models.

The trace has the times of all ops on all streams. It begins with the update of the previous step,
which overlaps the step's forward, and ends with the step's backward. The script ends there unless
you give --go-on.

    python -m megacompile trace --save step.json train.py --batch 16

A saved trace can be read later, also on another machine. Its last whole step is printed or plotted:

    python -m megacompile trace --save step.png step.json""",
        _trace_options,
        _check_trace,
    ),
    Command(
        "hardware",
        "measure the rates of this machine",
        """Measure the bandwidths and rates of this machine in a few seconds.

The rates are cached in a file, and predictions use them.""",
        _hardware_options,
    ),
)
