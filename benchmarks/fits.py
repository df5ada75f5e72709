"""Training steps of models that fit: megacompiled, plain, and with torch.compile, side by side.

    python -m benchmarks.fits [--model resnet50 bert-base] [--dtype float32 autocast]

One batch shape, at the sizes that people train: ResNet-50 and ViT-S on 64 images, BERT-base on
32x128 tokens, GPT-2 small on 8x1024, and a mixture of 16 experts. Each model and dtype is a
process, in which all three engines have taken their first steps before anything is timed. Some
processes compile beside one another; then each is timed alone, its engines in turns. A figure is
the median of the rounds, a round the mean of its steps. With `--profile`, cProfile's view of the
steps is written.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.loops.loop import (
    SIZES,
    Batch,
    Engine,
    LoopLoss,
    Session,
    optimizer_of,
    output_loss,
)
from benchmarks.loops.others import class_loss, images, timm, transformer
from benchmarks.loops.texts import experts, one_length, pretrained
from benchmarks.report import measure_alone, publish

SMALL = SIZES["small"]
WARM_UP = 6  # steps, until caches, clocks and the plan are there
DTYPES = ("float32", "autocast")


def _images() -> Batch:
    return images(replace(SMALL, rows=64), 0)


# A model, its batch and its loss. Dropout stays on, as people train.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], LoopLoss]] = {
    "resnet50": (lambda: timm("resnet50", "", SMALL), _images, class_loss),
    "vit-s": (
        lambda: pretrained("vit", transformer, SMALL, head="AutoModelForImageClassification"),
        _images,
        output_loss,
    ),
    "bert-base": (
        lambda: pretrained("bert", lambda size: {}, SMALL, head="AutoModelForMaskedLM"),
        lambda: one_length(replace(SMALL, rows=32, longest=128, vocabulary=30000), 0),
        output_loss,
    ),
    "gpt2-small": (
        lambda: pretrained("gpt2", lambda size: {}, SMALL),
        lambda: one_length(replace(SMALL, longest=1024, vocabulary=50000), 0),
        output_loss,
    ),
    "qwen3-moe": (
        lambda: pretrained("qwen3_moe", lambda size: {**experts(size), "num_experts": 16}, SMALL),
        lambda: one_length(SMALL, 0),
        output_loss,
    ),
}


def _ignored(*told: object) -> None:
    """Take no note: steps are timed from outside."""


class _Training:
    """A model in training by one engine."""

    def __init__(self, name: str, engine: Engine, dtype: str, device: str) -> None:
        build, batch, self.loss_of = MODELS[name]
        torch.manual_seed(0)
        session = Session(
            engine, SMALL, 0, device, "inductor", torch.float32, begin=_ignored, done=_ignored
        )
        self.model = session.prepare(build().train())
        self.optimizer = optimizer_of(self.model)
        self.batch = session.move(batch())
        self.cast = (
            torch.autocast(device, torch.bfloat16)
            if dtype == "autocast"
            else contextlib.nullcontext()
        )

    def step(self) -> torch.Tensor:
        with self.cast:
            loss = self.loss_of(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _timed(training: _Training, steps: int) -> float:
    """Seconds a step, from idle to idle."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(steps):
        training.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / steps


def _child(request: dict[str, Any]) -> None:
    """Warm up, say so, wait for a line, and time."""
    name, dtype = request["model"], request["dtype"]
    trainings, first_s, losses = {}, {}, {}
    for engine in Engine:
        start_s = time.perf_counter()
        trainings[engine] = _Training(name, engine, dtype, "cuda")
        for k in range(WARM_UP):
            losses[engine] = trainings[engine].step().item()
            if k == 0:
                first_s[engine] = time.perf_counter() - start_s
    print("ready", flush=True)
    sys.stdin.readline()
    rounds: dict[Engine, list[float]] = {engine: [] for engine in Engine}
    for _ in range(request["rounds"]):
        for engine, training in trainings.items():
            rounds[engine].append(_timed(training, request["steps"]))
    if request["profile"]:
        for engine, training in trainings.items():
            profile = cProfile.Profile()
            profile.enable()
            _timed(training, request["steps"])
            profile.disable()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
            file = Path(request["profile"]) / f"{name}.{dtype}.{engine.value}.txt"
            file.write_text(text.getvalue())
    took = {engine: statistics.median(times) for engine, times in rounds.items()}
    ours = took[Engine.OURS]
    row = {
        "model": name,
        "dtype": dtype,
        **{f"{engine.value}, ms": f"{1e3 * took[engine]:.1f}" for engine in Engine},
        "of plain": f"{ours / took[Engine.PLAIN]:.2f}",
        "of compile": f"{ours / took[Engine.COMPILE]:.2f}",
        **{f"{engine.value}, first s": f"{first_s[engine]:.1f}" for engine in Engine},
        f"loss {WARM_UP}": " ".join(f"{losses[engine]:.4f}" for engine in Engine),
    }
    print("row " + json.dumps(row), flush=True)


def _start(request: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.fits", "--child", json.dumps(request)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _answer(child: subprocess.Popen[str], start: str) -> str | None:
    """The rest of the next line that starts so; None if the process ended without one."""
    assert child.stdout
    for line in child.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
        print(line, end="", flush=True)
    print(f"{child.args!r} ended with status {child.wait()}", flush=True)
    return None


def _measured(requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """The rows of some processes: they get ready beside one another, and are timed in turn."""
    children = [_start(request) for request in requests]
    with ThreadPoolExecutor(len(children)) as pool:
        ready = list(pool.map(lambda child: _answer(child, "ready"), children))
    for child, said in zip(children, ready, strict=True):
        if said is None:
            continue
        assert child.stdin
        print("go", file=child.stdin, flush=True)
        if answer := _answer(child, "row "):
            print(answer, flush=True)
            yield json.loads(answer)
        child.wait()


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--jobs", type=int, default=3, help="processes beside one another")
    parser.add_argument("--profile", metavar="FOLDER", help="write profiles of the steps here")
    parser.add_argument("--out", help="write the table here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        _child(json.loads(args.child))
        return []
    fixed = {"rounds": args.rounds, "steps": args.steps, "profile": args.profile}
    requests = [
        {"model": name, "dtype": dtype, **fixed} for name in args.model for dtype in args.dtype
    ]
    measure_alone()
    rows: list[dict[str, object]] = []
    for k in range(0, len(requests), args.jobs):
        rows += _measured(requests[k : k + args.jobs])
    publish("Models that fit, a step", rows, args.out)
    return rows


if __name__ == "__main__":
    main()
