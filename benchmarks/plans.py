"""The search for a plan: how good what it finds is, and how long it takes.

    python -m benchmarks.plans --out plans.md
    python -m benchmarks.plans --models 2 --against exhaustive
    python -m benchmarks.plans --cases tiers --compare benchmarks/results/cpu-plans.md

Nothing but shapes is needed, and nothing runs. A row has the step that is predicted of the plan
that was found, and the seconds of the processor that the search took. There are two groups of
cases:

    grid     50: models by machines by device memory
    tiers    `benchmarks.plan_cases`: budgets of the host, a disk, 8-bit states, the update in the
             backward, small cards

With `--against exhaustive`, a finer grid of residents and shares is searched too, and the row says
by how much its best plan is faster. With `--against FILE`, the steps of a table that another
commit's search has written with `--out`. With `--compare FILE`, the steps that got longer by more
than 0.5 % than in such a table are printed, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import plan_cases
from benchmarks.report import publish
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.rates import known
from megacompile.plan import planner
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs

# layers, width, tokens of a sequence
_MODELS = ((12, 3584, 1024), (28, 3584, 4096), (48, 5120, 1024), (64, 5120, 1024), (80, 8192, 1024))
_FINE_COUNTS = tuple(k / 48 for k in range(49))
_FINE_SHARES = tuple(k / 20 for k in range(21))
_LONGER = 1.005


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a step got longer, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", choices=["grid", "tiers"], default="grid")
    parser.add_argument("--models", type=int, default=len(_MODELS), help="the first so many")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases that have it in their name"
    )
    parser.add_argument("--against", help="'exhaustive', or a table of another commit")
    parser.add_argument("--compare", metavar="FILE", help="a table: which steps got longer?")
    parser.add_argument("--out", help="write the table here: Markdown, or .json")
    args = parser.parse_args(argv)
    if args.against is not None and args.cases == "tiers":
        parser.error("--against is for --cases grid; needed --compare")
    kept = None if args.compare is None else steps_of(parser, args.compare)
    before = {}
    if args.against not in (None, "exhaustive"):
        before = steps_of(parser, args.against)
    rows: list[dict[str, object]] = []
    exhaustive = args.against == "exhaustive"
    for case, found in _rows(args.cases, args.models, args.only, exhaustive=exhaustive):
        if case in before:
            found["others"] = before[case]
        rows.append({"case": case, **found})
        print(rows[-1], flush=True)
    if not rows:
        parser.error(f"--only {args.only!r}: no case of {args.cases} has it in its name")
    if args.out and args.out.endswith(".json"):
        Path(args.out).write_text(json.dumps(rows, indent=1))
    else:
        publish("Plans that the search finds", rows, args.out)
    if kept is None:
        return 0
    found_longer = longer(rows, kept)
    print("\n".join(found_longer or [f"no step is longer than in {args.compare}"]))
    return int(bool(found_longer))


def steps_of(parser: argparse.ArgumentParser, path: str) -> dict[str, float | None]:
    """The predicted steps of a table that `--out` has written, by case."""
    try:
        text = Path(path).read_text()
        if not path.endswith(".json"):  # rows stand below the table, one a line
            text = f"[{','.join(text.split('```json')[1].split('```')[0].split(chr(10))[1:-1])}]"
        return {row["case"]: row["step_s"] for row in json.loads(text)}
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    except (IndexError, KeyError, TypeError, ValueError):
        parser.error(f"{path}: no table of `python -m benchmarks.plans --out`")


def longer(rows: Sequence[Mapping[str, Any]], kept: Mapping[str, float | None]) -> list[str]:
    """The cases whose step is longer than it was by more than 0.5 %, or that do not fit now."""
    found = []
    for row in rows:
        case, now = row["case"], row["step_s"]
        before = kept.get(case)
        if before is None:  # it did not fit, or was no case
            continue
        if now is None:
            found.append(f"{case}: does not fit; it took {before:.4g} s")
        elif now > _LONGER * before:
            found.append(f"{case}: {now:.4g} s, was {before:.4g} s ({now / before - 1:+.1%})")
    return found


def _rows(
    group: str, models: int, only: str, *, exhaustive: bool
) -> Iterator[tuple[str, dict[str, object]]]:
    """The name of each case, and what was found."""
    if group == "tiers":
        for case in plan_cases.TIERS:
            if only in case.name:
                yield case.name, plan_cases.row(case)
        return
    for layers, width, tokens in _MODELS[:models]:
        names = {f"{layers} x {width}, {tokens} tokens, {name}": m for name, m in _machines()}
        wanted = {name: machine for name, machine in names.items() if only in name}
        program = captured(layers, width, tokens) if wanted else None
        for name, machine in wanted.items():
            assert program is not None
            yield name, _row(program, machine, exhaustive=exhaustive)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 128)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return result


class _Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int = 152064) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def captured(layers: int, width: int, tokens: int, batch: int = 16) -> AbstractProgram:
    """A decoder on meta, whose plans can be sought."""
    with torch.device("meta"):
        model = _Decoder(layers, width).bfloat16()
        ids = torch.zeros(batch, tokens, dtype=torch.long)
    (program,) = abstract_programs(model, (ids,), options=abstract_options(), hardware=H200)
    return program


def _machines() -> Iterator[tuple[str, Hardware]]:
    slow = H200.replace(host_memory_gb_s=60.0, update_gb_s=40.0)
    machines = {
        "H200": H200,
        "H200, a slow host": slow,
        "H100": known("h100"),
        "A100": known("a100"),
        "RTX 4090": known("4090"),
    }
    for name, machine in machines.items():
        assert machine.device_bytes is not None
        for share in (0.4, 1.0):
            size = int(share * machine.device_bytes)
            yield f"{name}, {size >> 30} GiB", machine.replace(device_bytes=size)


def _row(program: AbstractProgram, machine: Hardware, *, exhaustive: bool) -> dict[str, object]:
    compiler = program.compiler
    options = compiler.setting.options
    assert machine.device_bytes is not None
    other = compiler.other(options, hardware=machine, budget_bytes=machine.device_bytes)
    planned = program.planned()
    graphs = other.pipeline.differentiated(planned.stages, planned.capture, planned.variant)
    start = time.process_time()
    problem = other.chooser.problem(graphs, planned.variant)
    found = planner.search(problem)
    search_s = time.process_time() - start
    if found is None:
        return {"step_s": None, "search_s": round(search_s, 2)}
    choice = found.choice
    row: dict[str, object] = {
        "step_s": round(found.step_s, 4),
        "expected_s": round(problem.expected_s(choice), 4),
        "kept": choice.keep,
        "resident": len(choice.places.resident),
        "device_update": choice.device_update,
        "search_s": round(search_s, 2),
    }
    if exhaustive:
        with (
            mock.patch.object(planner, "_COUNTS", _FINE_COUNTS),
            mock.patch.object(planner, "_SHARES", _FINE_SHARES),
        ):
            best = planner.search(replace(problem))
        assert best is not None
        row["exhaustive"] = round(problem.expected_s(best.choice), 4)
    return row


if __name__ == "__main__":
    sys.exit(main())
