"""The command `plan`: plans the training of a model and prints the answer."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from megacompile import option_checks
from megacompile.cli import target
from megacompile.cli.commands import DTYPES, OPTIMIZERS, print_json
from megacompile.cli.target import Target
from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import active_parameters
from megacompile.cost.probe import DiskRates
from megacompile.cost.rates import disk_on_file, known
from megacompile.errors import DeviceMemoryError, HostMemoryError, MegacompileError, OptionError
from megacompile.host_memory import too_small
from megacompile.ir.schedule import Schedule
from megacompile.options import Options, PlannedMesh
from megacompile.plan import explanation, scenario
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.explanation import Explanation
from megacompile.plan.fit import SMALLER, TRIED, more, short
from megacompile.plan.problem import DEVICE, HOST
from megacompile.plan.scenario import Scenario
from megacompile.text import columns, duration, format_bytes
from megacompile.validate import host_rows

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_LARGEST = 2**16  # largest batch of a sweep
_NO_FASTER = 1.01  # the sweep ends when a larger batch gains less
_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one batch."""

    target: Target
    batch: int
    explained: Explanation
    why_not: tuple[str, ...]  # reasons; empty if it fits as far as known
    planning_s: float
    gpus: int  # per host, each with this throughput
    hosts: int  # number of hosts
    active: int  # parameters per token, without the experts that it does not choose
    tried: bool  # does not fit, but by so little that it is tried

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second."""
        tokens = self.target.tokens
        return None if tokens is None else self.gpus * self.hosts * tokens / self.explained.step_s

    @property
    def tflop_s(self) -> float | None:
        """6 N T, with N the active parameters."""
        rate = self.tokens_s
        return None if rate is None else 6 * self.active * rate / 1e12

    def to_dict(self, tokens: float) -> dict[str, Any]:
        """The answer as JSON types."""
        rate = self.tokens_s
        return {
            "target": self.target.name,
            "batch": self.batch,
            "gpus": self.gpus,
            "hosts": self.hosts,
            "tokens_a_step": self.target.tokens,
            "active_parameters": self.active,
            "fits": not self.why_not,
            "why_not": list(self.why_not),
            "tried": self.tried,
            "step_s": self.explained.step_s,
            "tokens_per_s": rate,
            "tflop_s": self.tflop_s,
            "tokens": tokens,
            "tokens_take_s": None if rate is None else tokens / rate,
            "planning_s": self.planning_s,
            "plan": self.explained.to_dict(),
        }


def run(args: argparse.Namespace) -> int:
    """Plan and print the answer."""
    hardware = _hardware(args)
    answers = _sweep(args, hardware) if args.sweep else [_answer(args, hardware, args.batch)]
    fitting = [answer for answer in answers if not answer.why_not]
    best = max(fitting or answers[:1], key=lambda answer: answer.tokens_s or 0.0)
    if args.json:
        found = best.to_dict(args.tokens)
        if args.sweep:
            found["sweep"] = [answer.to_dict(args.tokens) for answer in answers]
        print_json(found)
    else:
        print(_text(best, args) + (f"\n\n{_sweep_table(answers)}" if args.sweep else ""))
    return 1 if best.why_not else 0


def _hardware(args: argparse.Namespace) -> Hardware:
    """One GPU's share of the machine that the options describe."""
    found = known(args.gpu)
    if args.link is not None:
        name = f"{found.name} with a link of {args.link:g} GB/s"
        found = found.with_link(args.link).replace(name=name)
    if args.host_memory is not None:
        host_bytes = _bytes("--host-memory", args.host_memory, found.host_bytes)
        found = found.replace(host_bytes=host_bytes)
    if args.page_locked is not None:
        locked_bytes = _bytes("--page-locked", args.page_locked, found.host_bytes)
        found = found.replace(locked_bytes=locked_bytes)
    if args.disk is not None:
        found = _disk_rates(args).on(found)
    found = found.shared_by(args.gpus)
    if args.interconnect is not None:
        found = found.with_interconnect(args.interconnect)
    return found if args.network is None else found.replace(network_gb_s=args.network)


def _bytes(name: str, size: float, total_bytes: int | None) -> int:
    """An option's size in bytes: an int, or a fraction of `total_bytes` (None: unknown)."""
    if isinstance(size, float) and not total_bytes:
        raise OptionError(f"{name} {size}: a fraction of an unknown size; pass a size: 20GiB")
    return int(size * (total_bytes or 0)) if isinstance(size, float) else size


def _disk_rates(args: argparse.Namespace) -> DiskRates:
    if args.disk_rates is not None:
        read, write = args.disk_rates
        return DiskRates(read, write, read / 2, write / 2)
    rates = disk_on_file(os.path.abspath(args.disk))
    if rates is None:
        raise OptionError(
            f"--disk {args.disk}: its rates are unknown; pass --disk-rates 2.2/2.2, or measure "
            f"them: python -m megacompile hardware --disk {args.disk}"
        )
    return rates


def _sweep(args: argparse.Namespace, hardware: Hardware) -> list[Answer]:
    """Try powers of two until one does not fit or gains nothing."""
    answers: list[Answer] = []
    batch = 1
    while batch <= _LARGEST:
        answer = _answer(args, hardware, batch)
        if answer.target.tokens is None:
            raise OptionError(
                f"--sweep batch: {args.target} takes no arguments batch and seq; add them to the "
                "function"
            )
        said = answer.why_not[0] if answer.why_not else f"{answer.tokens_s:,.0f} tokens/s"
        print(f"batch {batch}: {said}", file=sys.stderr, flush=True)
        answers.append(answer)
        rates = [each.tokens_s or 0.0 for each in answers[-2:]]
        if answer.why_not or (len(rates) == 2 and rates[1] < _NO_FASTER * rates[0]):
            break
        batch *= 2
    return answers


def _answer(args: argparse.Namespace, hardware: Hardware, batch: int) -> Answer:
    start = time.perf_counter()
    dtype = _DTYPES[args.dtype] if args.dtype else None
    made = target.build(args.target, batch=batch, seq=args.seq, dtype=dtype, float8=args.float8)
    options = _options(args, made, hardware)
    programs = _programs(made, options, hardware)
    compiler = programs[0].compiler
    schedules, refused = _schedules(programs)
    now = Scenario(
        tuple(schedules),
        hardware,
        compiler.setting.cost(states=OPTIMIZERS[args.optimizer]),
        device_bytes=compiler.budget.size_bytes(),
        host_bytes=hardware.host_bytes,
        disk_bytes=compiler.budget.disk_bytes(),
    )
    planned = [program.planned(reuse=program is programs[-1]) for program in programs]
    why_not = _first_too_small(made, options, now, fits=not refused) or refused
    lacks = now.device.peak.total_bytes - compiler.budget.size_bytes()
    if tried := lacks > 0 and not why_not:
        needed = short(DEVICE, now.device.peak.total_bytes, compiler.budget.size_bytes())
        why_not = (f"{needed}: {TRIED}", SMALLER, more({DEVICE: lacks}))
    again = None if args.sweep or why_not else compiler
    explained = Explanation.of(
        now,
        model=made.name,
        parameters=made.parameters,
        changes=scenario.changes(now, compiler, planned) if args.changes else (),
        budgets=scenario.budgets(now, again, planned) if args.changes or again else (),
    )
    active = made.parameters
    if made.tokens is not None:
        active = active_parameters(now.schedules, active, made.tokens)
    planning_s = time.perf_counter() - start
    return Answer(
        *(made, batch, explained, why_not, planning_s, args.gpus, args.hosts, active, tried)
    )


def _first_too_small(
    made: Target, options: Options, now: Scenario, *, fits: bool
) -> tuple[str, ...]:
    """The error of `megacompile()` before any plan, if the parameters do not fit on the host, where
    all of them start; with changes that would fix it."""

    def lines(*, on_disk: bool) -> tuple[str, ...]:
        rows = host_rows(
            made.model,
            gradients=options.optimizer is None,
            device_bytes=options.gpu_memory or now.hardware.device_bytes or 0,
            on_disk=on_disk,
            ranks=options.ranks,
        )
        sizes.append(sum(size for _, size in rows))
        return () if now.host_bytes is None else too_small(rows, now.host_bytes)

    sizes = [sum(now.host().values())]
    found = lines(on_disk=bool(options.disk_weights) or options.may_store_weights)
    if not found:
        return ()
    lacks = {HOST: max(sizes) - (now.host_bytes or 0)}
    device = now.device.peak.total_bytes - (now.device_bytes or 0)
    if device > 0:
        lacks = {DEVICE: device, **lacks}
    able = fits and device <= 0 and options.disk is None and options.ranks == 1
    if able and options.compute_dtype is None and not lines(on_disk=True):
        what = "parameters beyond host memory wait there for the plan"
        found += (f"with disk= it would fit: {what}",)
    return *found, more(lacks)


def _options(args: argparse.Namespace, made: Target, hardware: Hardware) -> Options:
    optimizer: torch.optim.Optimizer | None = None
    if args.update_in_backward:
        params = list(made.model.parameters())
        if OPTIMIZERS[args.optimizer] == 2:
            optimizer = torch.optim.AdamW(params)
        else:
            optimizer = torch.optim.SGD(params, momentum=0.9 * OPTIMIZERS[args.optimizer])
    memory = args.gpu_memory
    options = abstract_options(
        gpu_memory=memory and _bytes("--gpu-memory", memory, hardware.device_bytes),
        state_dtype=None if args.state_dtype == "same" else option_checks.dtype(args.state_dtype),
        compute_dtype=_DTYPES.get(args.compute_dtype),
        optimizer=optimizer,
        activations=args.activations,
        tiles="auto" if args.tiles is None else args.tiles,
    )
    if args.gpus > 1:
        options = replace(options, mesh=PlannedMesh(args.gpus, args.hosts))
    if args.disk is None:
        return options
    size, free = args.disk_memory, 0
    if os.path.isdir(args.disk):  # else it is another machine's
        free = shutil.disk_usage(args.disk).free
    return replace(
        options,
        disk=os.path.abspath(args.disk),
        disk_memory=(free if size is None else _bytes("--disk-memory", size, free)) // args.gpus,
        disk_weights=args.disk_weights or None,
        disk_saved=args.disk_saved or None,
    )


def _programs(made: Target, options: Options, hardware: Hardware) -> list[AbstractProgram]:
    try:
        return abstract_programs(
            made.model, made.args, made.kwargs, options=options, hardware=hardware
        )
    except MegacompileError:
        raise
    except Exception as error:  # raised by the model's code, through Dynamo
        first = (str(error).strip().splitlines() or [""])[0]
        raise OptionError(
            f"{made.name} cannot be captured: {type(error).__name__}: {first}"
        ) from error


def _schedules(programs: list[AbstractProgram]) -> tuple[list[Schedule], tuple[str, ...]]:
    """The schedules; if memory is too small, those closest to fitting, and why they do not."""
    found: list[Schedule] = []
    refused: tuple[str, ...] = ()
    for program in programs:
        reuse = program is programs[-1]
        try:
            found.append(program.schedule(reuse=reuse))
        except (DeviceMemoryError, HostMemoryError) as error:
            lines = str(error).removeprefix("megacompile(): ").splitlines()
            refused = refused or tuple(line for line in lines if not line.startswith("  "))
            program.plans.choose_least(program.stages, "this is the closest plan")
            found.append(program.schedule(reuse=reuse))
    return found, refused


def _text(answer: Answer, args: argparse.Namespace) -> str:
    made, explained = answer.target, answer.explained
    states = "" if not OPTIMIZERS[args.optimizer] else f", {args.state_dtype} states"
    where = " in the backward" if args.update_in_backward else ""
    active = ""
    if answer.active != made.parameters:
        active = f" ({answer.active / 1e9:,.3g} B active a token)"
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in made.model.parameters())
    products = f", float8 products ({args.float8})" if args.float8 else ""
    machine = f"one {explained.hardware}"
    if args.gpus > 1:
        hosts = "" if args.hosts == 1 else f" of each of {args.hosts} hosts"
        machine = f"each of {args.gpus} {explained.hardware}{hosts}"
        machine += "; memory is for one GPU"
    lines = [
        f"{made.name}: {made.parameters / 1e9:,.3g} B parameters{active}, {' and '.join(dtypes)}"
        + products,
        f"{made.shape} a step, {args.optimizer}{where}{states}, on {machine}",
        *([made.note] if made.note else []),
        "",
        *_verdict(answer),
        "",
        columns(explanation.memory_rows(explained)),
        "",
        *_speed(answer, args.tokens),
        *explanation.section_lines(
            [
                *explanation.budget_sections(explained),
                ("the plan", list(explained.reasons)),
                *explanation.change_sections(explained),
            ]
        ),
    ]
    return "\n".join([*lines, "", f"planned in {answer.planning_s:.0f} s; nothing was measured"])


def _verdict(answer: Answer) -> list[str]:
    if answer.why_not:
        first, *others = answer.why_not
        verdict = "it may not fit" if answer.tried else "it does NOT fit"
        return [f"{verdict}: {first}", *(f"  {other}" for other in others)]
    if answer.explained.host.fits is None:
        needed = format_bytes(answer.explained.host.needed_bytes)
        return [f"it fits on the device; the host needs {needed} (set --host-memory to check)"]
    return ["it fits"]


def _speed(answer: Answer, tokens: float) -> list[str]:
    explained = answer.explained
    whether = " if it did fit" if answer.why_not else ""
    rows = [["a step", f"{duration(explained.step_s)}{whether}, bound by {explained.bound}"]]
    rows.append(["its time depends on", explanation.bounds_text(explained)])
    rows += [["", line] for line in explanation.network_lines(explained)]
    if (rate := answer.tokens_s) is not None:
        rows.append(["tokens/s", f"{rate:,.0f}"])
        rows.append(["TFLOP/s by 6NT", _figures(answer.tflop_s or 0.0)])
        rows.append([f"{tokens:g} tokens take".replace("e+", "e"), _long(tokens / rate)])
    return columns(rows, left=(0, 1)).splitlines()


def _figures(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"


def _long(seconds: float) -> str:
    if seconds < _DAY_S:
        return f"{seconds / 3600:,.1f} hours"
    days = seconds / _DAY_S
    return f"{days:,.0f} days" + (f" ({days / 365.25:,.1f} years)" if days > 365 else "")


def _sweep_table(answers: list[Answer]) -> str:
    rows = [["batch", "a step", "tokens/s", "TFLOP/s", "device", "fits"]]
    for each in answers:
        step, rate = duration(each.explained.step_s), f"{each.tokens_s or 0:,.0f}"
        device = format_bytes(each.explained.device.needed_bytes)
        fits = "no" if each.why_not else "yes"
        rows.append([str(each.batch), step, rate, _figures(each.tflop_s or 0.0), device, fits])
    return columns(rows)
