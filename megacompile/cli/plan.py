"""The command `plan`: plans the training of a model and prints the answer."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import time
from typing import Any

import torch

from megacompile import option_checks
from megacompile.cli import OPTIMIZERS
from megacompile.cli.target import Target, build, first_line
from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import active_parameters
from megacompile.cost.rates import DiskRates, disk_on_file, known
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
from megacompile.text import columns, duration, format_bytes, short_count
from megacompile.validate import host_rows


def plan(args: argparse.Namespace) -> int:
    """Plan and print the answer."""
    start = time.perf_counter()
    hardware = _hardware(args)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    target = build(args.target, batch=args.batch, seq=args.seq, dtype=dtype)
    options = _options(args, target, hardware)
    programs = _programs(target, options, hardware)
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
    planned = [program.planned() for program in programs]
    why_not = _first_too_small(target, options, now) or refused
    lacks = now.device.peak.total_bytes - compiler.budget.size_bytes()
    if tried := lacks > 0 and not why_not:
        needed = short(DEVICE, now.device.peak.total_bytes, compiler.budget.size_bytes())
        why_not = (f"{needed}: {TRIED}", SMALLER, more({DEVICE: lacks}))
    if why_not and hardware.unified:
        both = now.device.peak.total_bytes + sum(now.host().values())
        why_not = short("memory", both, compiler.budget.size_bytes()), SMALLER
    explained = Explanation.of(
        now,
        model=target.name,
        parameters=target.parameters,
        changes=scenario.changes(now, compiler, planned) if args.changes else (),
    )
    active, rate = target.parameters, None
    if target.tokens is not None:
        active = active_parameters(now.schedules, active, target.tokens)
        rate = args.gpus * args.hosts * target.tokens / explained.step_s
    found = {
        "target": target.name,
        "batch": args.batch,
        "gpus": args.gpus,
        "hosts": args.hosts,
        "tokens_a_step": target.tokens,
        "active_parameters": active,  # per token, without the experts that it does not choose
        "fits": not why_not,
        "why_not": list(why_not),
        "tried": tried,  # does not fit, but by so little that it is tried
        "step_s": explained.step_s,
        "tokens_per_s": rate,
        "tflop_s": None if rate is None else 6 * active * rate / 1e12,
        "planning_s": time.perf_counter() - start,
    }
    if args.json:
        print(json.dumps({**found, "plan": explained.to_dict()}, indent=2))
    else:
        print(_text(found, target, explained, args))
    return 1 if why_not else 0


def _hardware(args: argparse.Namespace) -> Hardware:
    """One GPU's share of the machine that the options describe."""
    if (args.interconnect or args.hosts > 1) and args.gpus == 1:
        raise OptionError("--interconnect, --hosts: needed --gpus 2 or more, which share the model")
    if args.network and args.hosts == 1:
        raise OptionError("--network: needed --hosts 2 or more")
    if args.host_memory == 0:
        raise OptionError("--host-memory: got 0; needed a positive size, such as 64GiB")
    found = known(args.gpu)
    if found.unified:
        return _unified(args, found)
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


def _unified(args: argparse.Namespace, machine: Hardware) -> Hardware:
    """A machine with one memory, of the size of --host-memory."""
    given = vars(args) | {"gpus": args.gpus if args.gpus > 1 else None}
    refused = ("gpus", "link", "page_locked", "disk")
    if names := [f"--{name.replace('_', '-')}" for name in refused if given[name] is not None]:
        raise OptionError(
            f"{', '.join(names)}: {machine.name} has one memory, and nothing is copied; needed "
            "--host-memory or --gpu-memory alone"
        )
    if args.host_memory is None:
        return machine
    size_bytes = _bytes("--host-memory", args.host_memory, machine.device_bytes)
    return machine.replace(device_bytes=size_bytes)


def _bytes(name: str, size: float, total_bytes: int | None) -> int:
    """An option's size in bytes: an int, or a fraction of `total_bytes` (None: unknown)."""
    if isinstance(size, int) or not size:
        return int(size)
    if not total_bytes:
        raise OptionError(f"{name} {size}: a fraction of an unknown size; pass a size: 20GiB")
    return int(size * total_bytes)


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


def _options(args: argparse.Namespace, target: Target, hardware: Hardware) -> Options:
    optimizer: torch.optim.Optimizer | None = None
    params, states = target.model.parameters(), OPTIMIZERS[args.optimizer]
    if args.update_in_backward:
        sgd = functools.partial(torch.optim.SGD, momentum=0.9 * states)
        optimizer = (torch.optim.AdamW if states == 2 else sgd)(params)
    memory, disk, disk_memory = args.gpu_memory, args.disk, args.disk_memory
    if disk is not None:
        free = 0
        if os.path.isdir(disk):
            free = shutil.disk_usage(disk).free
        elif disk_memory is None:
            raise OptionError(
                f"--disk {disk}: no such folder; needed one or, for another machine's disk, "
                "--disk-memory and --disk-rates"
            )
        else:
            disk = tempfile.gettempdir()  # plans need a folder, and write nothing there
        disk_memory = free if disk_memory is None else _bytes("--disk-memory", disk_memory, free)
        disk_memory //= args.gpus
    return abstract_options(
        gpu_memory=memory and _bytes("--gpu-memory", memory, hardware.device_bytes),
        state_dtype=None if args.state_dtype == "same" else option_checks.dtype(args.state_dtype),
        compute_dtype=args.compute_dtype and option_checks.dtype(args.compute_dtype),
        optimizer=optimizer,
        activations=args.activations,
        tiles="auto" if args.tiles is None else args.tiles,
        mesh=PlannedMesh((args.hosts, args.gpus)) if args.gpus > 1 else None,
        disk=disk,
        disk_memory=disk_memory,
        disk_weights=args.disk_weights or None,
        disk_saved=args.disk_saved or None,
    )


def _programs(target: Target, options: Options, hardware: Hardware) -> list[AbstractProgram]:
    try:
        return abstract_programs(
            target.model, target.args, target.kwargs, options=options, hardware=hardware
        )
    except MegacompileError:
        raise
    except Exception as error:  # raised by the model's code, through Dynamo
        raise OptionError(f"{target.name} cannot be captured: {first_line(error)}") from error


def _schedules(programs: list[AbstractProgram]) -> tuple[list[Schedule], tuple[str, ...]]:
    """The schedules; if memory is too small, those closest to fitting, and why they do not."""
    found: list[Schedule] = []
    refused: tuple[str, ...] = ()
    for program in programs:
        try:
            found.append(program.schedule())
        except (DeviceMemoryError, HostMemoryError) as error:
            lines = str(error).removeprefix("megacompile(): ").splitlines()
            refused = refused or tuple(line for line in lines if not line.startswith("  "))
            program.plans.choose_least(program.stages, "this is the closest plan")
            found.append(program.schedule())
    return found, refused


def _first_too_small(target: Target, options: Options, now: Scenario) -> tuple[str, ...]:
    """The error of `megacompile()` before any plan, if the parameters do not fit on the host, where
    all of them start; with the memory that would be enough."""
    if now.hardware.unified:
        return ()
    device_bytes = options.gpu_memory or now.hardware.device_bytes or 0
    rows = host_rows(target.model, options, device_bytes)
    if now.host_bytes is None or not (found := too_small(rows, now.host_bytes)):
        return ()
    needed = max(sum(now.host().values()), sum(size for _, size in rows))
    device = now.device.peak.total_bytes - (now.device_bytes or 0)
    lacks = {DEVICE: device} if device > 0 else {}
    return *found, more({**lacks, HOST: needed - now.host_bytes})


def _text(
    found: dict[str, Any], target: Target, explained: Explanation, args: argparse.Namespace
) -> str:
    states = f", {args.state_dtype} states" if OPTIMIZERS[args.optimizer] else ""
    where = " in the backward" if args.update_in_backward else ""
    size = f"{short_count(target.parameters)} parameters"
    if found["active_parameters"] != target.parameters:
        size += f" ({short_count(found['active_parameters'])} active a token)"
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in target.model.parameters())
    machine = f"one {explained.hardware}"
    if args.gpus > 1:
        hosts = "" if args.hosts == 1 else f" of each of {args.hosts} hosts"
        machine = f"each of {args.gpus} {explained.hardware}{hosts}; memory is for one GPU"
    tokens = f"{args.batch} x {args.seq} tokens"
    inputs = "the function's inputs" if target.tokens is None else tokens
    verdict = "it may not fit" if found["tried"] else "it does NOT fit"
    if not found["why_not"]:
        verdict = "it fits"
        if explained.host.fits is None:
            needed = format_bytes(explained.host.needed_bytes)
            verdict += f" on the device; the host needs {needed} (set --host-memory to check)"
    rates = " with this machine's measured rates"
    if args.gpu != "this":
        rates = "; nothing was measured\n(with --gpu this, your machine is measured, once)"
    return "\n".join(
        [
            f"{target.name}: {size}, {' and '.join(dtypes)}",
            f"{inputs} a step, {args.optimizer}{where}{states}, on {machine}",
            "",
            "\n  ".join([": ".join([verdict, *found["why_not"][:1]]), *found["why_not"][1:]]),
            "",
            columns(explanation.memory_rows(explained)),
            "",
            columns(_speed(found, explained), left=(0, 1)),
            *explanation.section_lines(
                [("the plan", list(explained.reasons)), *explanation.change_sections(explained)]
            ),
            "",
            f"planned in {found['planning_s']:.0f} s{rates}",
        ]
    )


def _speed(found: dict[str, Any], explained: Explanation) -> list[list[str]]:
    whether = " if it did fit" if found["why_not"] else ""
    rows = [["a step", f"{duration(explained.step_s)}{whether}, bound by {explained.bound}"]]
    rows.append(["its time depends on", explanation.shares_text(explained.bounds)])
    rows += [["", line] for line in explanation.network_lines(explained)]
    if found["tokens_per_s"] is not None:
        rows.append(["tokens/s", f"{found['tokens_per_s']:,.0f}"])
        tflop_s = found["tflop_s"]
        rows.append(["TFLOP/s by 6NT", f"{tflop_s:,.3g}" if tflop_s < 1000 else f"{tflop_s:,.0f}"])
    return rows
