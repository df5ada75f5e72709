"""The command line: `python -m megacompile COMMAND`.

The options are declared here without importing torch, so that `--help` and argparse's errors appear
at once. An error of the user prints one line on stderr and exits with code 2.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megacompile.cost.hardware import ASSUMED_NETWORK_GB_S, NAMES
from megacompile.errors import MegacompileError
from megacompile.option_values import COMPUTE_DTYPES, STATE_DTYPES, Activations, parse_bytes

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # number of states

_DEMO = """Train a small GPT on the source of this package and show what runs.

Prints the losses, the schedule as a table of steps by streams, and a trace of one step."""

_PLAN = """Plan the training of a model on a machine that you need not have.

TARGET is a Hugging Face config of a causal language model (a folder with a config.json, or a json
file), or package.module:function. The function returns a module, or (module, args, kwargs). It gets
the arguments `batch` and `seq` if it takes them. The model is built on the meta device, without
memory, weights or a GPU. A module alone gets token ids (batch, seq) and should return its loss.

    python -m megacompile plan examples/configs/qwen2.5-72b.json --gpu h200 --host-memory 1.5TB

Exit code: 0 if it fits, 1 if it does not, 2 if it cannot be planned. A model that lacks less than
a tenth of the device's memory does not fit, but megacompile() tries it anyway; the answer says so.
"""

_BENCH = """Train standard models on this machine, and print how fast.

For each mode, the largest of four models of Qwen2.5's shape that fits, in bf16 with AdamW and
random weights: seconds a step, measured and predicted, tokens/s, TFLOP/s (6 * parameters * tokens a
second), peak memory, and the first step. Modes: planned; streamed; backward (the update in it, with
8-bit moments); plain; torch.compile. Needs transformers.
"""
_HARDWARE = """Measure the bandwidths and rates of this machine in a few seconds.

The rates are cached in a file, and predictions use them."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("python -m ")
        self.exit(2, f"{command}: {message} (see --help)\n")

    def add_count(self, name: str, default: int, help: str) -> None:
        """Add an option for a positive int; the help ends with its default."""
        help = f"{help}; default: {default}"
        self.add_argument(name, type=positive, default=default, metavar="N", help=help)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 if a planned model does not fit, or 2 after one
    line on stderr."""
    parser = _Parser(
        prog="python -m megacompile",
        usage="python -m megacompile COMMAND [options]",
        description="Train models that do not fit on the GPU, and inspect how.",
        epilog="See python -m megacompile COMMAND --help for each command.",
    )
    version = importlib.import_module("megacompile").__version__
    parser.add_argument("--version", action="version", version=f"megacompile {version}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog=parser.prog
    )
    for name, help, description, options in (
        ("demo", "train a small model and show its schedule and trace", _DEMO, _demo),
        ("plan", "find out if a model fits on a machine and how fast it trains", _PLAN, _plan),
        ("hardware", "measure the rates of this machine", _HARDWARE, _hardware),
        ("bench", "train standard models on this machine and print how fast", _BENCH, _bench),
    ):
        options(commands.add_parser(name, help=help, description=description))
    args = parser.parse_args(argv)
    module = args.command if args.command in ("plan", "bench") else "runs"
    try:
        work = getattr(importlib.import_module(f"{__name__}.{module}"), args.command)
        return int(work(args))
    except (MegacompileError, OSError) as error:
        print(f"megacompile {args.command}: {error}", file=sys.stderr)
        return 2


# --- values of options


def positive(text: str) -> int:
    """A positive int."""
    if (value := int(text)) > 0:
        return value
    raise ValueError(text)


def size(text: str) -> int | float:
    """Bytes of "20GiB", or "0.5" as a fraction of the machine's memory."""
    try:
        fraction = float(text)
    except ValueError:
        return parse_bytes("size", text, 0)
    if 0 <= fraction <= 1:
        return fraction
    raise argparse.ArgumentTypeError(f"{text}: needed a unit, 20GiB, or a fraction, 0.5")


def rates(text: str) -> tuple[float, float]:
    """GB/s of reads and of writes: "2.2/2"."""
    read, write = map(float, text.split("/"))
    return read, write


# --- options of each command


def _demo(parser: _Parser) -> None:
    parser.add_count("--steps", 30, "3 or more")
    parser.add_argument("--code", action="store_true", help="print the schedule's Python too")
    _add_device(parser)
    help = "write the trace for ui.perfetto.dev and chrome://tracing"
    parser.add_argument("--save", metavar="FILE", help=help)


def _hardware(parser: _Parser) -> None:
    _add_device(parser)
    parser.add_argument("--disk", metavar="PATH", help="also measure the disk of this folder")
    parser.add_argument("--again", action="store_true", help="measure even if rates are cached")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _bench(parser: _Parser) -> None:
    add = functools.partial(parser.add_argument, nargs="+")
    modes = ("planned", "streamed", "backward", "plain", "torch.compile")
    models = ("7.6B", "3.1B", "1.5B", "0.5B")
    _add_device(parser)
    parser.add_count("--minutes", 10, "begin no case after N minutes")
    add("--modes", choices=modes, metavar="MODE", help=f"{', '.join(modes)}; default: all")
    help = f"{', '.join(models)}: the first that fits; default: these"
    add("--models", choices=(*models, "tiny"), metavar="MODEL", help=help)
    parser.add_count("--batch", 8, "sequences per step")
    parser.add_count("--seq", 1024, "tokens per sequence")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_device(parser: _Parser) -> None:
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")


def _plan(parser: _Parser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="a config (folder or json), or package.module:function")
    add("--gpu", type=str.lower, choices=NAMES, default="h200", help="default: h200")
    parser.add_count("--gpus", 1, "GPUs of one host that share the model")
    help = (
        "bandwidth from the other GPUs to one, with --gpus; default: the GPU's NVLink. A rate no "
        "faster than the link to the host is assumed to share that link"
    )
    add("--interconnect", type=float, metavar="GB/S", help=help)
    help = "hosts that replicate the model, each with --gpus (a mesh of two dimensions)"
    parser.add_count("--hosts", 1, help)
    help = (
        "bandwidth from other hosts to one GPU while all GPUs communicate, with --hosts; "
        f"default: {ASSUMED_NETWORK_GB_S:g}, 100 Gbit/s each"
    )
    add("--network", type=float, metavar="GB/S", help=help)
    help = (
        "between host and GPU, one direction at a time: about 25 for PCIe 4 x16, 12 for x8; "
        "default: the GPU's"
    )
    add("--link", type=float, metavar="GB/S", help=help)
    help = "20GiB, or 0.5 of it; default: the GPU's, less 5 %% (4 GiB at most)"
    add("--gpu-memory", type=size, metavar="SIZE", help=help)
    help = (
        "1.5TB, 128GiB, used in full, as by megacompile(model, host_memory=SIZE); "
        "default: unknown, or all of this machine's"
    )
    add("--host-memory", type=size, metavar="SIZE", help=help)
    help = (
        "host memory that the system can lock for copies: 1GiB for WSL 2; 0 for containers that "
        "lock none; default: all"
    )
    add("--page-locked", type=size, metavar="SIZE", help=help)
    add("--disk", metavar="PATH", help="this folder's disk may hold what the host does not")
    help = "200GiB, for all GPUs; default: the free space"
    add("--disk-memory", type=size, metavar="SIZE", help=help)
    add("--disk-weights", action="store_true", help="megacompile(model, disk_weights=True)")
    add("--disk-saved", action="store_true", help="megacompile(model, disk_saved=True)")
    help = (
        "2.2/2.2: GB/s of reads and writes alone; together each has half; "
        "default: measured by `hardware --disk PATH`"
    )
    add("--disk-rates", type=rates, metavar="R/W", help=help)
    parser.add_count("--batch", 16, "sequences per step and GPU")
    parser.add_count("--seq", 1024, "tokens per sequence")
    add("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="default: adamw")
    help = "of the optimizer's moments; same: the parameters'; default: float32"
    add("--state-dtype", choices=(*STATE_DTYPES, "same"), default="float32", help=help)
    add("--update-in-backward", action="store_true", help="megacompile(model, optimizer=...)")
    help = "of the parameters; default: bfloat16 for a config"
    add("--dtype", choices=("bfloat16", "float16", "float32"), help=help)
    add("--compute-dtype", choices=COMPUTE_DTYPES, help="of streamed copies of float32 masters")
    add("--activations", choices=[each.value for each in Activations], default="auto")
    add("--tiles", type=positive, metavar="N", help="megacompile(model, tiles=N); default: auto")
    add("--changes", action="store_true", help="also try other plans and show what would help most")
    add("--json", action="store_true", help="print JSON")
