"""Training steps of a Qwen2 model, forward to AdamW, measured and predicted.

    python -m benchmarks.train_step --group optimizer --group planned:2 --out results.md
    python -m benchmarks.train_step --case exact --batch 64 --trace step.json

The cases are those of `benchmarks/cases.py`; they run one after the other in one process, so that
code is compiled once. The loop is a user's, and its time that of all steps together, from idle to
idle, over their number. Host memory is measured: the process's resident set after the last step,
less what it was before the model was there. What `megacompile.explain(model)` predicted stands
beside each figure. The model returns its loss alone, so that its head can be computed in chunks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.cases import GROUPS, Case
from benchmarks.models import (
    Loss,
    parameters,
    qwen2,
    to_float8,
    tokens,
    unwritten_qwen2,
    write,
)
from benchmarks.process_memory import status_bytes
from benchmarks.report import publish
from megacompile import explain, megacompile, trace
from megacompile.runtime.updates.compiled import wait_until_compiled


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted({case.name for cases in GROUPS.values() for case in cases})
    parser.add_argument(
        "--group",
        action="append",
        choices=[*GROUPS, *(f"{name}:{k}" for name in GROUPS for k in range(len(GROUPS[name])))],
        metavar="GROUP[:K]",
        default=[],
        help=f"{', '.join(GROUPS)}, or the Kth of its cases; default: all",
    )
    parser.add_argument("--case", action="append", choices=names, default=[])
    parser.add_argument("--layers", type=int, help="instead of the case's, as are the others")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--cap", type=float, dest="cap_gib", help="GiB of device memory")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--trace", help="write a chrome trace of two steps here")
    parser.add_argument("--timelines", help="write a Perfetto file of each case into this folder")
    parser.add_argument("--explain", help="write what explain() says of each case here")
    parser.add_argument("--cold", action="store_true", help="train no small model before")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    cases = [case for name in args.group or GROUPS for case in _group(name)]
    if args.case:
        every = [case for group in GROUPS.values() for case in group]
        cases = [next(case for case in every if case.name == name) for name in args.case]
    if args.timelines:
        Path(args.timelines).mkdir(parents=True, exist_ok=True)
    rows = []
    if not args.cold:
        _warm_up()
    for case in cases:
        given = ("layers", "batch", "length", "cap_gib", "steps")
        case = replace(case, **{k: getattr(args, k) for k in given if getattr(args, k)})
        rows.append(_row(case, args))
        print(rows[-1], flush=True)
    publish("Training steps, measured and predicted", rows, args.out)
    return rows


def _group(name: str) -> Sequence[Case]:
    group, _, k = name.partition(":")
    return GROUPS[group] if not k else (GROUPS[group][int(k)],)


class Training:
    """A model in training; `step` is what a user's loop does."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.clips = not case.in_backward
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        options = {**case.options, "state_dtype": case.state_dtype, "progress": False}
        if case.in_backward:
            options["optimizer"] = self.optimizer
        self.model = megacompile(model, **options)
        self.clip_s: list[float] = []

    def step(self, ids: torch.Tensor, *, idle_before_clip: bool = False) -> torch.Tensor:
        """One optimizer step; gives the loss, on the device."""
        loss: torch.Tensor = self.model(ids)
        loss.backward()
        if self.clips:
            if idle_before_clip:
                torch.cuda.synchronize()
            start = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.clip_s.append(time.perf_counter() - start)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        """Wait for the updates that run in the background, by a look at each parameter."""
        for param in self.model.parameters():
            param.flatten()[:1].tolist()
        torch.cuda.synchronize()


def _row(case: Case, args: argparse.Namespace) -> dict[str, object]:
    row: dict[str, object] = {
        "case": case.name,
        "model": f"{case.layers} layers",
        "tokens": f"{case.batch}x{case.length}",
        "cap GiB": "" if case.cap_gib is None else f"{case.cap_gib:g}",
    }
    try:
        with _capped(case.cap_gib):
            return {**row, **_measure(case, args)}
    except Exception as error:  # the other cases are still worth their time
        return {**row, "s": f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _measure(case: Case, args: argparse.Namespace) -> dict[str, object]:
    before = _resident_bytes()
    _forget_peak()
    print(f"{case.name}, {case.text}; {before / 2**30:.1f} GiB are used before", flush=True)
    if case.written_late:
        model = unwritten_qwen2(case.layers, dtype=case.dtype, **case.shape)
    else:
        model = qwen2(case.layers, dtype=case.dtype, device="cuda", **case.shape)
    count = parameters(model)
    ids = tokens(case.batch, case.length)
    whole = Loss(model)
    if case.float8 is not None:
        to_float8(whole, case.float8)
    start = time.perf_counter()
    training = Training(whole, case)
    if case.written_late:
        begun = time.perf_counter()
        write(training.model)
        start += time.perf_counter() - begun  # it is the benchmark's work
    del model, whole
    torch.cuda.empty_cache()
    first = training.step(ids).item()
    first_s = time.perf_counter() - start
    print(f"first step {first_s:.1f} s, loss {first:.4f}", flush=True)  # others may be cut off
    start = time.perf_counter()
    second = training.step(ids).item()
    second_s = time.perf_counter() - start
    print(f"second step {second_s:.1f} s, loss {second:.4f}", flush=True)
    wait_until_compiled()
    for _ in range(case.warm):  # buckets have moved, the second plan is compiled, states are there
        training.step(ids).item()
    gc.collect()  # what compiling left: half a second, which would count for a few steps alone
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    start = time.perf_counter()
    for _ in range(case.steps):
        loss = training.step(ids)
    last = loss.item()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / case.steps
    print(f"{seconds:.3f} s a step, loss {last:.4f}", flush=True)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    again = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    training.clip_s.clear()
    # alone: in the loop it waits for the backward; steps that are long are not made for it
    if training.clips and case.steps > 1:
        for _ in range(3):
            training.step(ids, idle_before_clip=True)
    training.wait()
    held, most = _resident_bytes() - before, _peak_bytes() - before
    found = explain(training.model, changes=False)
    if args.explain:
        with trace(training.model) as traced:
            for _ in range(2):
                training.step(ids)
            training.wait()
        found = explain(training.model, trace=traced, changes=False)
        if args.timelines:
            name = f"{case.name} {case.text}".replace(", ", "-").replace(" ", "-")
            traced.save(str(Path(args.timelines, f"{name}.json")))
        with Path(args.explain).open("a") as file:
            print(f"--- {case.name}: {case.text}\n\n{found}\n", file=file)
    if args.trace:
        _trace(training, ids, args.trace)
    needed, host = found.device.needed_bytes, found.host.needed_bytes
    return {
        "s": f"{seconds:.3f}",
        "predicted s": f"{found.step_s:.3f}",
        "error": _error(found.step_s, seconds),
        "TFLOP/s (6NT)": f"{6 * count * ids.numel() / seconds / 1e12:.0f}",
        "peak GiB": f"{peak / 2**30:.1f}",
        "predicted GiB": f"{needed / 2**30:.1f}",
        "error of it": _error(needed, peak),
        "reserved GiB": f"{reserved / 2**30:.1f}",
        "allocator retries": again,
        "host GiB": f"{held / 2**30:.1f}",
        "predicted host GiB": f"{host / 2**30:.1f}",
        "error of that": _error(host, held),
        "host peak GiB": f"{most / 2**30:.1f}",
        "host bytes/parameter": f"{held / count:.2f}",
        "clip ms": f"{statistics.median(training.clip_s) * 1e3:.0f}" if training.clip_s else "",
        "first step s": f"{first_s:.1f}",
        "second step s": f"{second_s:.1f}",
        "bound by": found.bound,
        "losses": f"{first:.4f} .. {last:.4f}",
    }


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


@contextmanager
def _capped(gib: float | None) -> Iterator[None]:
    """Limit the device memory of this process."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gib or 1e9) * 2**30 / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _warm_up() -> None:
    """Train a small model, so that what is measured is not the loading of compilers."""
    for options in ({}, {"resident": 0, "activations": "recompute"}):
        case = Case("", options=options)
        training = Training(Loss(qwen2(2, width=256, vocabulary=1024)), case)
        for _ in range(2):
            training.step(tokens(4, 256, 1024)).item()
    torch.compiler.reset()


def _resident_bytes() -> int:
    """Memory of this process in RAM, page-locked and shared mappings included."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024


def _peak_bytes() -> int:
    """The most memory that this process had in RAM since `_forget_peak`."""
    return status_bytes("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _trace(training: Training, ids: torch.Tensor, path: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        training.step(ids).item()
        training.step(ids).item()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)


if __name__ == "__main__":
    main()
