"""The same training steps by megacompile and by others, each in a process of its own.

    python -m benchmarks.peers
    python -m benchmarks.peers --model 3.9b 7.6b --tokens 16x1024 64x1024 --cap all 24 --minutes 12
    python -m benchmarks.peers --device cpu --model tiny --tokens 4x64 --peer plain megacompile

The first of `--model`, `--tokens` and `--cap` is the base; the others vary one at a time (`--grid`:
all combinations). At each setting the systems take turns. The JSON file is whole after each point,
and `--out FILE --continue` goes on with it; a setting that another machine has begun is measured
again. At the end come a table and a plot. `--out FOLDER` names the file by the GPU and the time, as
`benchmarks.peers.page` looks for it; `make peers` is the whole comparison, with that page.

Packages that are not installed come from `--wheels DIR`: a folder of wheels or of packages, which
each process has behind its own packages. DeepSpeed and RoundPipe compile C++ at first use, which
needs a compiler and ninja.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.peers import driver, process, wheels
from benchmarks.peers.catalogue import DEFAULT, PEERS
from benchmarks.peers.outcome import Outcome, Status
from benchmarks.peers.plot import draw
from benchmarks.peers.store import Results, load
from benchmarks.peers.summary import differing, figures, kinds, rows
from benchmarks.peers.work import MODELS, Point
from benchmarks.report import environment
from megacompile.host_memory import total_bytes

N = TypeVar("N", int, float)

ROOT = Path(__file__).resolve().parents[2]
HOST_MARGIN_BYTES = 4 * 2**30  # of the host's memory, which no process may take
PICTURES = (".png", ".svg", ".pdf")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, draw; gives the exit code: 1 where first losses differ."""
    args = parse(argv)
    out = file_of(args.out, args.device)
    results = load(out) if args.go_on else Results()
    settings = driver.settings(args.model, args.tokens, args.cap, grid=args.grid)
    results.runs.append(machine(args.device, sys.argv[1:] if argv is None else argv))
    results.plan(driver.points(settings, args.peer, args.repeats))
    again = [Status.NOT_TRIED, Status.NOT_INSTALLED]
    failed = [status for status in Status if status is not Status.OK]
    driver.forget(results, failed if args.retry else again, everywhere=args.retry)
    for text in driver.keep_apart(results):
        print(text, flush=True)
    results.save(out)
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        folder = Path(temporary)
        paths = wheels.importable(args.wheels, folder / "wheels") if args.wheels else []
        driver.go(
            results,
            out,
            lambda point, limit_s: launch(point, limit_s, args, folder, paths),
            limit_s=args.timeout,
            total_s=args.minutes * 60,
            say=lambda text: print(text, flush=True),
        )
    return show(results, out, args.plot)


def file_of(out: Path | None, device: str) -> Path:
    """The file of a run: the given one, or one of its own in the folder that is given, or here."""
    when = time.strftime("%Y%m%d-%H%M%S")
    if out is None:
        return Path(f"peers-{when}.json")
    if not out.is_dir():
        return out
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    words = gpu.lower().removeprefix("nvidia ").split()
    return out / f"{'-'.join(words)}-{when}-peers.json"


def show(results: Results, out: Path, picture: Path | None) -> int:
    """Print the tables and draw the plot; gives the exit code."""
    of = rows(results)
    print(f"\n{figures(of)}\n\n{kinds(of)}\n\n{out} is written")
    where = picture or out.with_suffix(".png")
    print(draw(where, of, gpu_gib=results.runs[-1].get("gpu GiB")))
    for text in differing(of):
        print(f"not the same work: {text}")
    return 1 if differing(of) else 0


def launch(
    point: Point, limit_s: float, args: argparse.Namespace, folder: Path, paths: Sequence[Path]
) -> Outcome:
    """Measure a point in a process of its own."""
    if not PEERS[point.peer].comes_apart:  # what others import must not change what it does
        paths = ()
    request = {
        "point": point.as_json(),
        "device": args.device,
        "warm": args.warm,
        "steps": args.steps,
        "paths": [str(path.resolve()) for path in paths],
    }
    own = Path(tempfile.mkdtemp(dir=folder))
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    surroundings = wheels.with_scripts(os.environ, list(paths))
    outcome = process.run(
        [sys.executable, "-m", "benchmarks.peers.child", json.dumps(request)],
        own,
        limit_s=limit_s,
        host_bytes=total_bytes() - HOST_MARGIN_BYTES,
        environment={**surroundings, "PYTHONPATH": os.pathsep.join(search)},
    )
    if args.verbose or outcome.status is Status.CRASHED:
        print((own / "printed").read_text(errors="replace")[-4000:], flush=True)
    return outcome


def machine(device: str, argv: Sequence[str]) -> dict[str, Any]:
    """The machine and versions of a run."""
    said: dict[str, Any] = environment()
    said["command"] = " ".join(["python -m benchmarks.peers", *argv])
    said["transformers"] = metadata.version("transformers")
    said["host GiB"] = round(total_bytes() / 2**30)
    said["date"] = time.strftime("%Y-%m-%d")
    said["machine"] = platform.node()
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        said["gpu GiB"] = round(gpu.total_memory / 2**30, 1)
        said["machine"] = str(gpu.uuid)  # a container's name may change on the same machine
    return said


def within(kind: Callable[[str], N], low: float, *, above: bool = False) -> Callable[[str], N]:
    """A parser of numbers from `low`, or `above` it."""

    def read(text: str) -> N:
        try:
            value: N | None = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < math.inf or (above and value == low):  # nan is not
            noun = "an integer" if kind is int else "a number"
            limits = f"above {low:g}" if above else f"from {low:g}"
            raise argparse.ArgumentTypeError(f"got {text!r}, needed {noun} {limits}")
        return value

    return read


COUNT = within(int, 1)
MORE_THAN_0 = within(float, 0, above=True)


def tokens(text: str) -> tuple[int, int]:
    """ "16x1024": sequences by their length."""
    batch, _, length = text.partition("x")
    try:
        return COUNT(batch), within(int, 2)(length)
    except argparse.ArgumentTypeError:
        needed = "sequences x tokens, such as 16x1024, from 1x2"  # one token has no next one
        raise argparse.ArgumentTypeError(f"got {text!r}, needed {needed}") from None


def cap(text: str) -> float | None:
    """GiB of GPU memory; None: all of it."""
    try:
        return None if text == "all" else MORE_THAN_0(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or all") from None


def known_folder(text: str) -> Path:
    """A folder that is there."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, needed a folder that is there")
    return Path(text)


def path_in_folder(text: str) -> Path:
    """A path in a folder that is there."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, needed a path in a folder that is there")
    return Path(text)


def picture_path(text: str) -> Path:
    """A path that a picture is written to."""
    if Path(text).suffix not in PICTURES:
        endings = ", ".join(PICTURES)
        raise argparse.ArgumentTypeError(f"got {text!r}, needed an ending among {endings}")
    return path_in_folder(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    summary, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    add("--model", nargs="+", choices=MODELS, default=["3.9b" if gpu else "tiny"])
    add("--tokens", nargs="+", type=tokens, metavar="BxL", default=[(16, 1024) if gpu else (4, 64)])
    add("--cap", nargs="+", type=cap, default=[None], metavar="GIB", help='GPU memory, or "all"')
    add("--peer", nargs="+", choices=PEERS, default=list(DEFAULT), help=", ".join(PEERS))
    add("--grid", action="store_true", help="all combinations")
    add("--repeats", type=COUNT, default=2, help="processes of each system at each setting")
    add("--warm", type=within(int, 0), default=3, help="steps between the first one and those")
    add("--steps", type=COUNT, default=4, help="that are timed")
    add(
        "--timeout",
        type=MORE_THAN_0,
        default=150.0,
        help="seconds of one process; more where C++ is built",
    )
    add("--minutes", type=MORE_THAN_0, default=60.0, help="of all of them together")
    add("--wheels", type=known_folder, metavar="DIR", help="packages that are not installed")
    add("--out", type=path_in_folder, help="JSON, or its folder; default: peers-<time>.json")
    add("--continue", dest="go_on", action="store_true", help="go on with --out")
    add("--retry", action="store_true", help="with --continue: try again all that failed")
    add("--plot", type=picture_path, help="default: beside the JSON, as .png")
    add("--verbose", action="store_true", help="show what each process printed")
    args = parser.parse_args(argv)
    if args.go_on != bool(args.out and args.out.exists() and not args.out.is_dir()):
        there = "no such file" if args.go_on else f"{args.out} is there already"
        parser.error(f"{there}; needed --out FILE, and --continue to go on with it")
    if args.device == "cuda" and not gpu:
        parser.error("--device: got cuda, and torch sees no GPU; needed --device cpu")
    return args


def _terminated(*_: object) -> None:
    raise SystemExit(143)  # so that the process of the point is ended too


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
