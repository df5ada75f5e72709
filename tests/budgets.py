"""`python -m tests.budgets`: random models and budgets, each of which runs or is refused.

Each case is forked from this process, under a limit of memory (RLIMIT_DATA): what the budgets
allow, and a little for Python; the device's memory is in it too. It trains for three steps, within
`host_memory=` and what the plan said, or is refused before there is any gradient or state. Anything
else is a fault: an error, a signal, a hang, memory over a budget, a late refusal.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megacompile import accumulate, explain, host_memory, megacompile
from megacompile.errors import DeviceMemoryError, DiskError, HostMemoryError
from megacompile.runtime.device.buffers import DiskBuffer, HostBuffer
from megacompile.runtime.model.streamed import streamed_model
from tests.processes import in_child
from tests.zoo import Language

SLACK_BYTES = 96 * 2**20  # of Python, of threads' stacks, and of what kernels need inside
TIME_LIMIT_S = 180
MIB = 2**20
BATCH = 4


class Block(nn.Module):
    """A layer with an adapter, a norm and odd sizes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.adapter = nn.Linear(width, 3, bias=False)
        self.back = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.up(y))) + self.back(self.adapter(y))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params, **given: torch.optim.SGD(params, momentum=0.9, **given),
    "plain SGD": torch.optim.SGD,
}


@dataclass(frozen=True)
class Case:
    """A model and budgets. Sizes of budgets are shares of the parameters' bytes."""

    seed: int
    width: int
    inner: tuple[int, ...]
    words: int
    tied: bool
    frozen: str  # "", "base" (all but the adapters), "half" (every other block)
    dtype: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    in_backward: bool = False
    micro_batches: int = 1
    host: float | None = None  # None: what the process may have
    exact: bool = False  # to the byte what a plan with all the memory there is says
    device: float = 4.0
    disk: float | None = None  # None: there is no disk
    disk_weights: bool = False

    @staticmethod
    def draw(seed: int, scale: int = 1) -> Case:
        """A case; `scale` divides the width."""
        rng = random.Random(seed)
        width = rng.choice((192, 256, 320)) // scale
        inner = tuple(rng.choice((1, 2, 3, 4)) * width + 1 for _ in range(rng.randint(2, 6)))
        options: dict[str, Any] = {}
        if rng.random() < 0.35:
            options["state_dtype"] = "int8"
        if rng.random() < 0.2:
            options["activations"] = rng.choice(("keep", "recompute", "offload"))
        disk = rng.uniform(0.1, 4.0) if rng.random() < 0.5 else None
        disk_weights = disk is not None and rng.random() < 0.4
        dtype = rng.choice(("float32", "float32", "bfloat16", "computed"))
        if dtype == "computed" and not disk_weights:
            options["compute_dtype"] = "bfloat16"
        if rng.random() < 0.2:
            options["grad_dtype"] = "float32"
        return Case(
            seed,
            width,
            inner,
            words=rng.choice((1000, 4001)) // scale,
            tied=rng.random() < 0.3,
            frozen=rng.choice(("", "", "", "base", "half")),
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            optimizer=rng.choice(("AdamW", "AdamW", "SGD", "plain SGD")),
            options=options,
            in_backward=rng.random() < 0.5,
            micro_batches=rng.choice((1, 1, 2)),
            host=None if rng.random() < 0.1 else rng.uniform(0.3, 5.0),
            exact=rng.random() < 0.3,
            device=rng.uniform(0.3, 6.0),
            disk=disk,
            disk_weights=disk_weights,
        )

    def plain(self) -> Language:
        blocks = (Block(self.width, size) for size in self.inner)
        return Language(self.words, self.width, blocks, tied=self.tied)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        made = self.plain().to(getattr(torch, self.dtype))
        for name, param in made.named_parameters():
            adapter = "adapter" in name or "back" in name
            odd = name.startswith("layers.") and int(name.split(".")[1]) % 2 == 1
            frozen = {"": False, "base": not adapter, "half": odd}[self.frozen]
            param.requires_grad_(not frozen)
        return made

    def param_bytes(self) -> int:
        with torch.device("meta"):
            made = self.plain()
        dtype: torch.dtype = getattr(torch, self.dtype)
        return sum(p.numel() for p in made.parameters()) * dtype.itemsize


FAULTS = ("refused late", "killed", "fault")


@dataclass(frozen=True)
class Outcome:
    end: str  # "ran", "refused", "refused as warned", or one of FAULTS
    what: str = ""  # of an error, the type and the first line
    share: float | None = None  # of host buffers after the first step, of what the plan said


class Meter:
    """What host buffers take, in whatever way they were made."""

    def __init__(self) -> None:
        self.live = 0
        self.peaks = [0]  # at the beginning and in the first step; in each other
        stock, meter = HostBuffer.__new__, self

        def made(cls: type[HostBuffer], size_bytes: int, **given: Any) -> HostBuffer:
            buffer = stock(cls, size_bytes, **given)
            if not issubclass(cls, DiskBuffer):
                meter.live += size_bytes
                meter.peaks[-1] = max(meter.peaks[-1], meter.live)
                weakref.finalize(buffer, meter.gone, size_bytes)
            return buffer

        self.patch = mock.patch.object(HostBuffer, "__new__", staticmethod(made))

    def next(self) -> None:
        self.peaks.append(self.live)

    def gone(self, size_bytes: int) -> None:
        self.live -= size_bytes


def train(
    case: Case,
    folder: Path,
    given: dict[str, Any],
    steps: int,
    stepped: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train for so many steps, calling `stepped` after each; with 0, only the first forward."""
    model = case.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained, lr=0.001)
    options = {
        k: getattr(torch, v) if k.endswith("_dtype") and v != "int8" else v
        for k, v in case.options.items()
    }
    if case.in_backward:
        options["optimizer"] = optimizer
    if case.disk is not None:
        options |= {"disk": folder, "disk_weights": case.disk_weights}
    try:
        megacompile(model, device="cpu", lowering="eager", progress=False, **options, **given)
        tokens = torch.arange(BATCH * 16).view(BATCH, 16) % case.words
        if not steps:
            model(tokens)
        for _ in range(steps):
            for k in range(case.micro_batches):
                last = k + 1 == case.micro_batches
                marked = case.in_backward and not last
                with accumulate(model) if marked else nullcontext():
                    model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped()
        for param in trained:
            assert param.isfinite().all()
    except (HostMemoryError, DeviceMemoryError, DiskError) as error:
        if optimizer.state or any(p.grad is not None for p in trained):
            raise RefusedLate(f"{type(error).__name__}: {error}") from error
        raise
    return model


class RefusedLate(Exception):
    """A refusal in the middle of training. Right where a plan that did not know the optimizer has
    warned that host memory does not hold the states of AdamW."""


_FEWER_STATES = "An optimizer step that needs more raises an error"


def budgets_of(case: Case, folder: Path) -> dict[str, Any]:
    """`host_memory=` and the like, in bytes."""
    params = case.param_bytes()
    given: dict[str, Any] = {"gpu_memory": int(case.device * params)}
    if case.disk is not None:
        given["disk_memory"] = int(case.disk * params) + 65536
    if case.host is None:
        return given
    given["host_memory"] = int(case.host * params)
    if case.exact:
        try:
            model = train(case, folder, given | {"host_memory": 64 * params}, 0)
            given["host_memory"] = explain(model, changes=False).host.needed_bytes
        except (HostMemoryError, DeviceMemoryError, DiskError):
            pass
    return given


def trial(case: Case, folder: Path) -> Outcome:
    warnings.simplefilter("ignore")
    threading.stack_size(MIB)
    given = budgets_of(case, folder)
    host, device = given.get("host_memory"), given["gpu_memory"]
    started = _private_bytes()
    within = max(case.param_bytes(), host or 8 * case.param_bytes())
    limit = within + device + SLACK_BYTES
    host_memory.MARGIN_BYTES = 0  # it is in the slack, of which there is less here
    resource.setrlimit(resource.RLIMIT_DATA, (started + limit, resource.RLIM_INFINITY))
    meter, planned = Meter(), 0
    end, what = "ran", ""
    with meter.patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model = train(case, folder, given, 3, meter.next)
            planned = explain(model, changes=False).host.needed_bytes
            end, what = _within(model, meter.peaks, planned, given)
        except (HostMemoryError, DeviceMemoryError, DiskError) as error:
            end, what = "refused", _line(error)
        except RefusedLate as error:
            warned = any(_FEWER_STATES in str(each.message) for each in said)
            end, what = "refused as warned" if warned else "refused late", _line(error)
        except BaseException as error:
            end, what = "fault", _line(error) + "\n" + traceback.format_exc(limit=-6)
    return Outcome(end, what, max(meter.peaks[1:]) / planned if planned else None)


def _within(
    model: nn.Module, peaks: Sequence[int], planned: int, given: dict[str, Any]
) -> tuple[str, str]:
    host, stored = given.get("host_memory"), given.get("disk_memory")
    disk = streamed_model(model, "test").machine.disk
    if host is not None and max(peaks) > host:
        return "fault", f"{max(peaks)} bytes of host buffers, and the budget is {host}"
    if max(peaks[1:]) > planned:
        return "fault", f"{max(peaks[1:])} bytes of host buffers, and the plan said {planned}"
    if disk is not None and stored is not None and disk.used_bytes > stored:
        return "fault", f"{disk.used_bytes} bytes on the disk, and the budget is {stored}"
    return "ran", ""


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _private_bytes() -> int:
    """What RLIMIT_DATA limits: memory of this process's own, touched or not."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def warm_up(folder: Path) -> None:
    """What the first model of a process loads and compiles is in all children."""
    for disk in (None, 1.0):
        case = Case(0, 16, (16,), 64, False, "", "float32", "AdamW", host=8.0, disk=disk)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explain(train(case, folder, {"gpu_memory": 2**26, "host_memory": 2**26}, 2))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.budgets", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--scale", type=int, default=1, help="models are as much narrower")
    parser.add_argument("--folder", default=None, help="of the disk; default: a temporary one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ends: Counter[str] = Counter(dict.fromkeys(("ran", "refused", "killed"), 0))
    shares = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        warm_up(folder)
        for seed in range(options.seed, options.seed + options.cases):
            case = Case.draw(seed, options.scale)
            try:
                outcome = in_child(partial(trial, case, folder), TIME_LIMIT_S)
            except AssertionError as error:  # it hung, or was killed
                outcome = Outcome("killed", str(error))
            ends[outcome.end] += 1
            if outcome.end in FAULTS:
                print(f"FAULT in {case}\n  {outcome.end}: {outcome.what}", flush=True)
            if outcome.end == "ran" and outcome.share:
                shares.append(outcome.share)
    print(f"{options.cases} cases:", ", ".join(f"{n} {end}" for end, n in ends.items()))
    if shares:
        print(f"host buffers: {min(shares):.3f} to {max(shares):.3f} of what the plan said")
    return int(any(ends[end] for end in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
