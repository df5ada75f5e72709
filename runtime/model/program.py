"""The schedules of one captured graph for one kind of call: a program; and a model's plans, which
assume a placement of its buckets.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megacompile import compat, notices, progress
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import DeviceMemoryError
from megacompile.ir import ops
from megacompile.ir.buckets import ParamId, Unit
from megacompile.ir.capture import (
    Capture,
    GraphInput,
    PackedInput,
    ParamInput,
    Variant,
)
from megacompile.ir.plan import Placement, first_to_disk
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import Number, Symbols, TensorMeta
from megacompile.ir.values import bytes_of, computed_outputs, expected_tangents, inputs_of
from megacompile.options import Options
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.pipeline import Planned
from megacompile.runtime.disk import Disk
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine


class MovesFirst(BaseException):
    """Buckets move before a captured graph runs for the first time, and the call begins again. If
    they cannot move, `lacking` is raised; it is None if no part of the call has run: then they can.

    A BaseException, so that user code in between that catches `Exception` does not see it.
    """

    def __init__(self, lacking: DeviceMemoryError | None = None) -> None:
        super().__init__()
        self.lacking = lacking


@dataclass(eq=False)
class Plans:
    """The plans of a model for one layout of its buckets, at their current placement."""

    compiler: PassCompiler
    placement: Placement
    version: int = 0  # plans of older versions are planned again at their next use

    def expire(self) -> None:
        """Make every captured graph plan again at its next call."""
        self.version += 1

    def note(self, **facts: Any) -> None:
        """Record facts that plans heed from now on: why buckets cannot move (`stays`), or that
        gradients of micro-batches count (`accumulates`)."""
        self.placement = replace(self.placement, **facts)

    def step_down(self, machine: Machine, ran_out: str, where: str) -> None:
        """Plan with less memory, free the old plan's slots and all CUDA graphs, and warn. Raises
        DeviceMemoryError if nothing is left to free."""
        machine.slots.forget()
        machine.forget_graphs()
        gc.collect()
        torch.cuda.empty_cache()
        how = self.compiler.step_down()
        if not how:
            needs = self.compiler.chooser.needs()
            raise DeviceMemoryError(
                f"megacompile(): device memory ran out in {where}, with every stage recomputed and "
                f"nothing resident ({ran_out})\n{needs}{'' if not needs else chr(10)}"
                'use smaller batches or sequences, or activations="offload"'
            )
        notices.warn(
            f"megacompile: device memory ran out in {where}, which is repeated with a smaller "
            f"plan: {how} ({ran_out})",
            notices.Whose.RANK,
        )


# Placement before the first plan.


def first_that_fit(
    units: Sequence[Unit], params: Mapping[int, Sequence[nn.Parameter]], options: Options
) -> frozenset[int]:
    """The first buckets that fit, with gradients and states, into `options.resident` bytes."""
    assert options.resident is not None
    cost, left, chosen = OptimizerCost.of(options), float(options.resident), set[int]()
    for unit in units:
        trained = [i for i, p in enumerate(params[unit.bucket.key]) if p.requires_grad]
        left -= cost.resident_bytes(unit.bucket, trained)
        if left < 0:
            break
        chosen.add(unit.bucket.key)
    return frozenset(chosen)


def fills_later(params: Iterable[torch.Tensor], device: torch.device) -> bool:
    """True if parameters are copied to their buckets in the background: pages that are pinned for a
    GPU take time. If the values come from the GPU, as much must be free there: the next allocation
    (another model, for example) could fail otherwise."""
    if device.type != "cuda":
        return False
    on_gpu = sum(param.nbytes for param in params if param.device.type == "cuda")
    return on_gpu <= compat.free_device_bytes(device)


def weights_on_disk(
    units: Sequence[Unit],
    params: Mapping[int, Sequence[nn.Parameter]],  # by bucket key
    options: Options,
    disk: Disk | None,
    resident: frozenset[int],
    new_bytes: int,
) -> frozenset[int]:
    """Keys of the buckets whose parameters go to the disk before the first plan: all with
    `disk_weights=True`. If plans decide, as few as possible for the rest to fit on the host, with
    `new_bytes` for those that are not there yet; plans move them later. Raises DiskError if they do
    not fit on the disk; none has moved."""
    if disk is None or not (options.disk_weights or options.may_store_weights):
        return frozenset()
    streamed = [unit.bucket for unit in units if unit.bucket.key not in resident]
    trained = {key for key, each in params.items() if any(p.requires_grad for p in each)}
    order = first_to_disk(streamed, trained)
    disk_bytes = [disk.round_up(bucket.size_bytes) for bucket in order]
    if options.disk_weights:
        disk.check(sum(disk_bytes))
        return frozenset(unit.bucket.key for unit in units)  # residents may leave the device
    new = [sum(p.nbytes for p in params[b.key] if p.device.type != "cpu") for b in order]
    # one bucket at a time is in flight to the disk
    limit_bytes = sys.maxsize if options.host_memory is None else options.host_memory
    limit_bytes -= max(disk_bytes, default=0)
    left_bytes = sum(bucket.size_bytes for bucket in order)
    count = 0
    while count < len(order) and (left_bytes > limit_bytes or sum(new[count:]) > new_bytes):
        left_bytes -= order[count].size_bytes
        count += 1
    disk.check(sum(disk_bytes[:count]))
    return frozenset(bucket.key for bucket in order[:count])


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


VARIANTS = 256  # schedules per program; the oldest are dropped


@contextlib.contextmanager
def compiling(name: str, machine: Machine) -> Iterator[None]:
    """Wraps the compilation for a schedule: counts it and logs its duration."""
    with machine.code.counting(name), _stages_own_ambient():
        yield


@contextlib.contextmanager
def _stages_own_ambient() -> Iterator[None]:
    """Disable the caller's saved-tensor hooks for stages, and lock out tracing by other threads."""
    with (
        compat.compile_lock,
        compat.without_saved_tensors_hooks(),
        compat.without_sources(),
        compat.on_host(),
    ):
        yield


class Program:
    """The schedules of one capture, built at first use."""

    def __init__(
        self, capture: Capture, plans: Plans, machine: Machine, stages: Schedule | None = None
    ) -> None:
        self.capture = capture
        self.plans = plans
        self.machine = machine
        if stages is None:
            with _stages_own_ambient():
                stages = plans.compiler.pipeline.partition(capture)
        self.stages = stages
        outputs, _ = ops.returned(self.stages.forward)
        self.outputs: tuple[Any, ...] = tuple(outputs)
        # positions of the outputs that stages compute, each value once; and of the outputs among
        # these that require grad (also under `no_grad`, if the graph enables it)
        self.computed = computed_outputs(self.outputs)
        differentiable = [k for k in self.computed if self.outputs[k].meta["value"].requires_grad]
        self.differentiable = frozenset(differentiable)
        self.inputs = inputs_of(self.stages.forward)  # name in the schedule -> position
        # the inputs that the forward changes in place
        changes = ops.nodes_of(self.stages.forward, ops.assign)
        self.changed_names = frozenset(str(node.args[0]) for node in changes)
        self.changed = frozenset(map(self.inputs.__getitem__, self.changed_names))
        # inputs whose changes autograd records, and the outputs that are their new values
        first = len(self.outputs) - len(stages.recorded)
        self.recorded = [(self.inputs[n], first + k) for k, n in enumerate(stages.recorded)]
        # the inputs of the schedule, with packed parameters unpacked
        given: list[GraphInput] = []
        for item in capture.inputs:
            given += item.parts if isinstance(item, PackedInput) else (item,)
        # positions of parameters, of other tensors, and of symbols
        self.streamed = [k for k, item in enumerate(given) if isinstance(item, ParamInput)]
        self.tensors = [k for k, item in enumerate(given) if isinstance(item, TensorMeta)]
        self.numbers = [k for k, item in enumerate(given) if isinstance(item, Number)]
        params = [item for item in given if isinstance(item, ParamInput) and item.requires_grad]
        places = dict.fromkeys([(p.bucket.key, p.param) for p in params])
        self.places: tuple[ParamId, ...] = tuple(places)  # of trained parameters
        self.executors: dict[Variant, Executor] = {}
        self._planned: dict[Variant, Schedule] = {}  # without code yet
        self._fakes: dict[compat.SymbolicFakes, tuple[int, ...]] = {}  # -> symbols' positions
        if stages.symbols is not None:
            self._note(stages.symbols)
        self.tangents = expected_tangents(self.stages)
        self.ran_backward = False
        # outputs of the last call that should be views of parameters, and their names
        self.views: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def anew(self, stages: Schedule | None = None) -> Program:
        """The same program and code without schedules; `stages` are for other sizes."""
        stages = replace(self.stages) if stages is None else stages
        made = Program(self.capture, self.plans, self.machine, stages)
        made.tangents = self.tangents
        made.ran_backward = self.ran_backward
        return made

    def replan(self) -> None:
        """Drop the schedules and their plans."""
        self.stages = replace(self.stages)
        self.executors.clear()
        self._planned.clear()

    def variant(self, **changes: Any) -> Variant:
        """The variant for the currently expected gradients."""
        update = self.machine.in_backward is not None
        return replace(Variant(self.tangents, keep_last=True, update=update), **changes)

    def choose(self, variant: Variant, *, again: bool = False) -> Placement:
        """Choose the plan of a variant; returns the wanted placement. With `again`, buckets may
        leave the device, even if a plan for smaller inputs put them there."""
        progress.now("planning the step")
        planned = Planned(self.stages, self.capture, variant)
        with _stages_own_ambient():
            return self.plans.compiler.choose(planned, self.plans.placement, again=again)

    def plan(self, variant: Variant) -> Schedule:
        """Plan the schedule of a variant, to which `executor` then adds code."""
        progress.now("planning the step")
        planned = Planned(self.stages, self.capture, variant)
        with _stages_own_ambient():
            made = self.plans.compiler.plan(planned, self.plans.placement)
        self._planned[variant] = made
        return made

    def executor(self, variant: Variant) -> Executor:
        """The executor of a variant, built at first use."""
        if variant not in self.executors:
            while len(self.executors) >= VARIANTS:
                self.executors.pop(next(iter(self.executors)))
            if variant not in self._planned:
                self.plan(variant)
            schedule = self._planned.pop(variant)
            with compiling(schedule.name, self.machine):
                schedule = self.plans.compiler.lower(schedule)
            if not self.machine.steps:
                progress.now("running the first step")
            self.executors[variant] = Executor(schedule, self.machine)
            for template in schedule.templates:
                if template.symbols is not None:
                    template.symbols.fakes.note_guards(lambda: "its compiled code")
                    self._note(template.symbols)
        return self.executors[variant]

    # --- symbolic sizes

    def _note(self, symbols: Symbols) -> None:
        """Record the relations under which code is valid."""
        every = list(self.capture.planned)
        self._fakes[symbols.fakes] = tuple(every.index(symbol) for symbol in symbols.planned)

    def serves(self, values: Sequence[int | float]) -> bool:
        """True if a call with these values would run code that is valid for them."""
        if not self.holds(values):
            return False
        variant = self.variant()
        if variant in self.executors:
            return True
        self.executor(variant)  # whose code may be valid for fewer values
        return self.holds(values)

    def holds(self, values: Sequence[int | float]) -> bool:
        """True if all of its code is valid for these values of the captured graph's symbols."""
        each = self._fakes.items()
        return all(fakes.holds(*map(values.__getitem__, at)) for fakes, at in each)

    def broken(self, values: Sequence[int | float]) -> str:
        """The relation that these values violate, and the code that requires it; "" if all hold."""
        each = (fakes.broken([values[k] for k in at]) for fakes, at in self._fakes.items())
        return next(filter(None, each), "")

    @functools.cached_property
    def size_bytes(self) -> Callable[..., int]:
        """Bytes of its stages' outputs and saved tensors, as a function of the symbols' values."""
        schedule = next(iter(self.executors.values())).schedule
        return bytes_of(schedule, list(self.capture.planned))

    def number(self, value: Any, args: Sequence[Any]) -> Any:
        """The value of an output that is or contains a number, for a call's inputs."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.number(item, args) for item in value)
        if not isinstance(value, Number):
            return value
        given = dict(zip(self.capture.planned, [args[k] for k in self.numbers], strict=True))
        return compat.evaluated(value.expression, given)
