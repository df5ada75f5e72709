"""The page docs/cards.md, what fits where, made from plans.

    python -m benchmarks.cards          # print it
    python -m benchmarks.cards --write  # some 10 minutes on one core

Each model is captured once for each mode, and planned for every GPU with every size of host memory.
Nothing is measured, except the H200's rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megacompile.cli.target import Target, build
from megacompile.cost.hardware import GPUS, Hardware
from megacompile.errors import DeviceMemoryError, HostMemoryError
from megacompile.host_memory import too_small
from megacompile.options import Options
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.compiler import SettledPlans
from megacompile.plan.scenario import Scenario
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes
from megacompile.validate import host_rows

CONFIGS = Path("examples/configs")
MODELS = {
    "1.5 B": "qwen2.5-1.5b",
    "3.1 B": "qwen2.5-3b",
    "7.6 B": "qwen2.5-7b",
    "14.8 B": "qwen2.5-14b",
    "32.8 B": "qwen2.5-32b",
    "72.7 B": "qwen2.5-72b",
    "120.3 B": "120b",
}
CARDS = ("3060", "3080", "3090", "4090", "5090", "a100-40gb", "a100", "h100", "h200", "gh200")
ONE_MEMORY = ("gb10", "strix-halo")
HOSTS_GIB = (32, 64, 128, 256, 512, 1500)
BATCH, LENGTH = 8, 1024
PAGE = Path("docs/cards.md")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train a model."""

    mark: str  # after the number of tokens
    in_backward: bool
    state_dtype: torch.dtype | str


MODES = (Mode("", False, torch.float32), Mode(" b", True, "int8"))  # the first that fits is shown


_HEAD = f"""# What fits where

Predicted tokens a second, made by `python -m benchmarks.cards --write` from plans of
`python -m megacompile plan`. **Nothing on this page was measured.** Models have Qwen2.5's shapes in
bf16; a step has {BATCH}x{LENGTH} tokens and AdamW.

- Columns are GiB of host memory.
- A number alone: the exact mode, with float32 moments.
- With *b*: the exact mode does not fit, and the update is made in the backward with 8-bit moments.
- `-`: neither fits.

Figures that were measured, with their predictions: [measured.md](measured.md). `python -m
megacompile bench` measures your machine.
"""

_RATES = """## Assumed rates

The H200's were measured. The others are data sheets' figures times the share of its data sheet that
the H200 reached (`megacompile/cost/hardware.py`); `python -m megacompile hardware` measures yours.

| GPU | memory | bf16 TFLOP/s | memory GB/s | link GB/s | host memory GB/s |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--only", choices=list(MODELS), nargs="+", default=list(MODELS))
    args = parser.parse_args()
    text = page(args.only)
    if args.write:
        PAGE.write_text(text)
    else:
        print(text)


def page(models: list[str]) -> str:
    """The text of docs/cards.md."""
    lines = [_HEAD]
    for name in models:
        lines += [f"## {name}", "", *table(name), ""]
    return "\n".join([*lines, *rates()])


def table(name: str) -> Iterator[str]:
    """One model: a row for each GPU, a column for each size of host memory."""
    planners = [Planner(name, mode) for mode in MODES]
    yield "| GPU | " + " | ".join(map(str, HOSTS_GIB)) + " |"
    yield "|---|" + "---|" * len(HOSTS_GIB)
    for card in (*CARDS, *ONE_MEMORY):
        one = card in ONE_MEMORY
        sizes: list[int | None] = [None] if one else [gib * 2**30 for gib in reversed(HOSTS_GIB)]
        found = ["-"] * len(sizes)
        for planner in planners:
            rates_of = planner.over(card, sizes)
            found = [
                f"{rate:,.0f}{planner.mode.mark}" if rate and cell == "-" else cell
                for rate, cell in zip(rates_of, found, strict=True)
            ]
        cells = [f"{found[0]} (128 GB in all)", *[""] * 5] if one else found[::-1]
        yield f"| {GPUS[card].name.removeprefix('NVIDIA ')} | " + " | ".join(cells) + " |"


class Planner:
    """A captured model, planned for one machine after another."""

    def __init__(self, name: str, mode: Mode) -> None:
        self.mode = mode
        config = str(CONFIGS / f"{MODELS[name]}.json")
        self.target: Target = build(config, batch=BATCH, seq=LENGTH, dtype=None)
        optimizer = torch.optim.AdamW(self.target.model.parameters()) if mode.in_backward else None
        self.options: Options = abstract_options(optimizer=optimizer, state_dtype=mode.state_dtype)
        self.programs: list[AbstractProgram] = abstract_programs(
            self.target.model,
            self.target.args,
            self.target.kwargs,
            options=self.options,
            hardware=GPUS["h200"],
        )

    def over(self, card: str, sizes: list[int | None]) -> list[float | None]:
        """Tokens a second with each size of host memory, the largest first (None: the machine's
        own); None where the model does not fit."""
        rates: list[float | None] = []
        needed: float = float("inf")
        for size in sizes:
            if rates and rates[-1] is None:
                rates.append(None)  # nor does it fit with less
            elif rates and size is not None and needed <= size:
                rates.append(rates[-1])  # the same plan
            else:
                rate, needed = self.plan(GPUS[card], size)
                rates.append(rate)
        return rates

    def plan(self, machine: Hardware, host_bytes: int | None) -> tuple[float | None, float]:
        """Tokens a second and the host memory needed, in bytes."""
        assert self.target.tokens is not None
        if host_bytes is not None:
            machine = machine.replace(host_bytes=host_bytes)
        budget = Setting(self.options, machine).free_bytes()
        if host_bytes is not None and too_small(self.rows(budget), host_bytes):
            return None, float("inf")
        first = self.programs[0].compiler
        other = first.other(
            self.options, hardware=machine, budget_bytes=budget, host_bytes=host_bytes
        )
        plans = SettledPlans(other)
        try:
            schedules = [plans.schedule(program.planned(), draft=True) for program in self.programs]
        except (DeviceMemoryError, HostMemoryError):
            return None, float("inf")
        now = Scenario(tuple(schedules), machine, other.setting.cost())
        if now.device.peak.total_bytes > budget:
            return None, float("inf")
        first_bytes = sum(size for _, size in self.rows(budget))
        return self.target.tokens / now.step_s, max(sum(now.host().values()), first_bytes)

    def rows(self, device_bytes: int) -> list[tuple[str, int]]:
        """Rows of host memory that are needed before any plan, in bytes."""
        return host_rows(self.target.model, self.options, device_bytes)


def rates() -> list[str]:
    """The assumed rates of each machine."""
    lines = [_RATES]
    for name in (*CARDS, *ONE_MEMORY):
        m = GPUS[name]
        link = "none" if m.unified else f"{m.h2d_gb_s:.0f}"
        cells = (m.matmul_tflop_s, m.memory_gb_s)
        lines.append(
            f"| {m.name.removeprefix('NVIDIA ')} | {format_bytes(m.device_bytes or 0)} | "
            + " | ".join(f"{cell:,.0f}" for cell in cells)
            + f" | {link} | {m.host_memory_gb_s:.0f} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
