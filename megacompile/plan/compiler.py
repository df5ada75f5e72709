"""From a captured graph to its schedule: the passes in their order, with a plan that was sought."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacompile import compat, log
from megacompile.cost.hardware import H200, Hardware, cached, load
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import DeviceMemoryError
from megacompile.ir import ops
from megacompile.ir.buckets import Unit
from megacompile.ir.capture import Capture, Variant
from megacompile.ir.schedule import PassRecord, Plan, Schedule
from megacompile.ir.stages import Code, Template
from megacompile.options import Activations, Head, Lowering, Options
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.chunk import STOOD_BACK, chunk_head
from megacompile.passes.capture.rebase import rebase_overlaps
from megacompile.passes.schedule.device_update import insert_device_update
from megacompile.passes.schedule.differentiate import differentiate
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.norms import insert_norms
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.offload_saved import offload_saved_tensors
from megacompile.passes.schedule.plan import make_plan
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.passes.schedule.recompute import insert_recompute
from megacompile.passes.schedule.slots import assign_slots
from megacompile.passes.schedule.split import split_stages
from megacompile.passes.schedule.update import insert_updates
from megacompile.passes.stages.lower import lower
from megacompile.passes.stages.partition import partition
from megacompile.passes.stages.templates import TemplateCache, trace_templates
from megacompile.plan.planner import Choice, Found, Problem, does_not_fit, search, table
from megacompile.progress import bar
from megacompile.text import format_bytes
from megacompile.verify.proof import verify

_MARGIN = 0.05  # of free device memory, for what is not planned: fragmentation, cuBLAS, NCCL
_MARGIN_BYTES = 4 * 2**30  # at most: most of that does not grow with the memory
_ASSUMED = H200.replace(name="NVIDIA H200 (assumed: not measured here)")
_TOLERANCE = 1.1  # how much more than there is a plan may need before it is refused


class PassCompiler:
    """Runs the passes in order and keeps their history."""

    def __init__(
        self, options: Options, units: tuple[Unit, ...], *, hardware: Hardware | None = None
    ) -> None:
        self.options = options
        self.machine = hardware  # a GPU that plans are made for; None: the one at hand
        self.units = units
        self.templates: TemplateCache = {}
        self.resident: frozenset[int] = frozenset()  # keys of the buckets on the device
        self.wanted: frozenset[int] = frozenset()  # what they should be from the next call on
        self.planned = False  # has it been decided what is resident?
        self.stays = ""  # why no bucket may go elsewhere
        self.budget: int | None = None  # bytes of device memory
        self.needed = 0  # bytes that the largest plan takes, as predicted
        self.floors: list[int] = []  # bytes that plans take at least
        self.problem: Problem | None = None  # the last one
        self.sought: tuple[tuple[int, ...], Found] | None = None  # of which templates; the last one
        self.choices: dict[Schedule, tuple[Choice, tuple[str, ...]]] = {}  # by captured stages

    def partition(self, capture: Capture) -> Schedule:
        options = self.options
        causal = functools.partial(use_causal_attention, lowering=options.lowering)
        chunk = functools.partial(chunk_head, head=options.head, lowering=options.lowering)
        made = [_captured("rebase", capture, lambda given: (rebase_overlaps(given), ()), 0)]
        made.append(_captured("causal", made[-1].capture, causal, made[-1].record.nodes))
        made.append(_captured("chunk", made[-1].capture, chunk, made[-1].record.nodes))
        capture, reasons = made[-1].capture, made[-1].reasons
        for reason in reasons:
            if options.head is Head.CHUNKED and reason.startswith(STOOD_BACK):
                warnings.warn(
                    f"megacompile(): {capture.name}: head='chunked', but {reason}", stacklevel=2
                )
        history = tuple(one.record for one in made)
        stages = _timed("partition", None, lambda: partition(capture, self.units), history)
        log.captured(capture, stages)
        return replace(
            stages,
            plan=Plan(reasons=tuple(reason for one in made for reason in one.reasons)),
        )

    def build(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        schedule = self.plan(stages, capture, variant)
        schedule = _timed(
            "lower",
            schedule,
            lambda: lower(schedule, lowering=self.options.lowering, progress=self._progress),
        )
        log.schedule_made(schedule)
        return schedule

    def plan(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """The verified schedule, whose templates have graphs and no code yet."""
        schedule = self.differentiated(stages, capture, variant)
        choice, reasons = self._choose(stages, schedule, variant)
        if not variant.keep_last:
            choice = replace(choice, keep=0)
        choice = replace(choice, resident=self.resident)
        schedule = self._finish(schedule, variant, choice, reasons)
        verify(schedule)
        return schedule

    def differentiated(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """The passes in front of the choice of a plan."""
        trace = functools.partial(
            trace_templates,
            ambient=capture.ambient,
            cache=self.templates,
            lowering=self.options.lowering,
        )
        schedule = replace(stages, tangents=variant.tangents)
        return _run(schedule, [("templates", trace), ("differentiate", differentiate)])

    def problem_of(
        self, schedule: Schedule, variant: Variant, *, resident: frozenset[int] = frozenset()
    ) -> Problem:
        """What a plan is sought for.

        Args:
            schedule: what `differentiated` gives.
            resident: keys of the buckets that live on the device, whatever the plan.
        """
        return Problem(
            build=lambda choice: self._finish(schedule, variant, choice, draft=True),
            buckets=schedule.buckets,
            stages=sum(stage.traced.has_backward for stage in schedule.stages),
            hardware=self.rates(),
            optimizer=self.cost(),
            budget_bytes=self.budget_bytes(),
            fused=self.options.lowering is Lowering.INDUCTOR,
            resident=resident,
            trained=schedule.gradient_params,
        )

    def _finish(
        self,
        schedule: Schedule,
        variant: Variant,
        choice: Choice,
        reasons: tuple[str, ...] = (),
        *,
        draft: bool = False,
    ) -> Schedule:
        """The passes behind the choice of a plan."""
        options = self.options
        slots = options.least_slots + choice.more_slots
        share = choice.device_update if options.device_update is None else options.device_update
        plan = functools.partial(
            make_plan,
            keep=choice.keep,
            activations="offload" if choice.offload else options.activations.value,
            lookahead=options.lookahead,
            device_update=share,
            resident=choice.resident,
            state_delay=choice.state_delay,
        )
        schedule = replace(schedule, plan=Plan(reasons=(*schedule.plan.reasons, *reasons)))
        offload = functools.partial(offload_saved_tensors, lookahead=options.lookahead)
        if draft:
            schedule = replace(schedule.copy(), draft=True)
        return _run(
            schedule,
            [
                ("plan", plan),
                ("split", functools.partial(split_stages, cache=self.templates)),
                ("recompute", insert_recompute),
                ("offload_saved", offload),
                *self._gradient_passes(choice, variant),
                ("prefetch", functools.partial(insert_prefetch, lookahead=options.lookahead)),
                ("slots", functools.partial(assign_slots, slots=slots, reuse=variant.reuse)),
                ("free", insert_free),
            ],
        )

    def _choose(
        self, stages: Schedule, schedule: Schedule, variant: Variant
    ) -> tuple[Choice, tuple[str, ...]]:
        """What the plan is made from; sought once for each captured graph and shape."""
        options = self.options
        floor = Choice(resident=self.resident)
        if schedule.backward is None or not (options.plans or self.machine is not None):
            return floor, ()
        if stages not in self.choices:
            free = options.resident is None and not self.planned and not self.stays
            resident = frozenset() if free else self.resident
            problem = self.problem_of(schedule, variant, resident=resident)
            pinned = options.activations is not Activations.AUTO
            device_update = options.hands_over and options.device_update is None and self.on_gpu
            templates = tuple(id(stage.traced) for stage in schedule.stages)
            found = self._found_before(problem, templates)
            if found is None:
                found = search(
                    problem,
                    resident=free,
                    pinned=pinned,
                    device_update=device_update,
                    slots=options.slots is None,
                )
            if found is None:
                found = self._too_small(problem)
            reasons = found.reasons
            if self.stays and options.resident is None:
                reasons = (*reasons, f"buckets stay where they are: {self.stays}")
            self.choices[stages] = found.choice, reasons
            self.needed = max(self.needed, found.peak_bytes)
            self.floors.append(problem.floor_bytes())
            self.problem = problem
            if free:
                self.planned, self.wanted = True, found.choice.resident
                self.sought = templates, found
        return self.choices[stages]

    def _found_before(self, problem: Problem, templates: tuple[int, ...]) -> Found | None:
        """What the same was planned with before its buckets were moved to where that wants them."""
        before, self.sought = self.sought, None
        if before is None or before[0] != templates:
            return None
        found = before[1]
        if found.choice.resident != problem.resident:
            return None
        return found if problem.fits(found.choice) else None

    @staticmethod
    def _too_small(problem: Problem) -> Found:
        """Not even the floor fits. The prediction may be off by a little; then it is tried."""
        choice = Choice(0, problem.resident, state_lookahead=1)
        peak = problem.memory(choice).peak
        text = (
            f"device memory: {format_bytes(peak.total_bytes)} needed, "
            f"{format_bytes(problem.budget_bytes)} there"
        )
        if peak.total_bytes > _TOLERANCE * problem.budget_bytes:
            raise DeviceMemoryError(does_not_fit(problem, peak))
        return Found(choice, math.inf, peak.total_bytes, 0, (f"{text}: tried nevertheless",))

    def keep(self, stages: Collection[Schedule], schedules: Collection[Schedule]) -> None:
        """Forget what was traced and planned for all but these captured stages and schedules."""
        used = {template for schedule in schedules for template in schedule.templates}
        for key, template in self.templates.items():
            if template in used and isinstance(key, tuple) and isinstance(key[0], Template):
                used.add(key[0])  # what it was split from
        for key in [key for key, template in self.templates.items() if template not in used]:
            del self.templates[key]
        for key in [key for key in self.choices if key not in stages]:
            del self.choices[key]

    def step_down(self) -> str:
        """Plan with less device memory from now on; "" where that changes nothing.

        What the last plan needs was too much, so the next one gets nine tenths of it.
        """
        if not self.needed or not self.options.plans:
            return ""
        floor = min(self.floors, default=0)
        if self.needed <= floor:
            return ""
        self.budget = max(int(0.9 * self.needed), floor)
        self.planned = False  # stages that have their choice keep it: a backward may be to come
        self.needed = 0
        return f"at most {format_bytes(self.budget)} of device memory"

    def stay(self) -> None:
        """Plan anew with the buckets where they are. No backward may be to come."""
        self.wanted = self.resident
        self.choices.clear()

    def needs(self) -> str:
        """What of device memory the least demanding plan needs, as a table; "" if not known."""
        if self.problem is None:
            return ""
        return table(self.problem, self.problem.floor().peak)

    def budget_bytes(self) -> int:
        """Device memory that a plan may use: what the user said, or what was free at first."""
        if self.budget is None:
            self.budget = self.options.gpu_memory
        if self.budget is None and self.machine is not None and self.machine.device_bytes:
            self.budget = _less_margin(self.machine.device_bytes)
        if self.budget is None:
            self.budget = _less_margin(compat.free_device_bytes(self.options.device))
        return self.budget

    def settled(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """`plan`, and again with the buckets where it wants them, as a model's next call would."""
        schedule = self.plan(stages, capture, variant)
        if self.wanted == self.resident:
            return schedule
        self.resident = self.wanted
        self.choices.clear()
        return self.plan(stages, capture, variant)

    def other(self, options: Options, *, hardware: Hardware, budget_bytes: int) -> PassCompiler:
        """One that plans the same model with other options, from nothing, and knows its code."""
        made = PassCompiler(options, self.units, hardware=hardware)
        made.templates = self.templates
        made.budget = budget_bytes
        return made

    def floor(self, stages: Schedule, reason: str) -> None:
        """Plan these stages with as little device memory as can be, though that is too much."""
        self.choices[stages] = Choice(0, self.resident, state_lookahead=1), (reason,)

    @property
    def on_gpu(self) -> bool:
        """Is what is planned for a GPU?"""
        return self.options.device.type == "cuda" or self.machine is not None

    def cost(self, *, states: int | None = None) -> OptimizerCost:
        """Of an optimizer with `states` moments, under the options."""
        return OptimizerCost.of(self.options, states=states, on_gpu=self.on_gpu)

    def rates(self) -> Hardware:
        """Of the machine that is planned for."""
        if self.machine is not None:
            return self.machine
        if self.options.device.type == "cuda":
            return load(self.options.device)
        return cached(self.options.device) or _ASSUMED  # nobody measures for a plan on the CPU

    def _gradient_passes(
        self, choice: Choice, variant: Variant
    ) -> list[tuple[str, Callable[[Schedule], Schedule]]]:
        """What becomes of the gradients: they are offloaded, or updates are made of them."""
        options = self.options
        cost = self.cost()
        if variant.update:
            insert = functools.partial(
                insert_updates,
                accumulate=variant.accumulate,
                lookahead=choice.state_lookahead or options.lookahead,
                masters=options.compute_dtype is not None,
                state_bytes=cost.updated_of,
            )
            return [("update", insert)]
        offload = functools.partial(offload_gradients, accumulate=variant.accumulate)
        if options.lowering is Lowering.EAGER:
            return [("offload_grad", offload)]
        give = functools.partial(insert_device_update, state_bytes=cost.updated_of)
        return [("offload_grad", offload), ("norms", insert_norms), ("device_update", give)]

    def _progress(
        self, work: Iterable[tuple[Template, Code]], total: int
    ) -> Iterator[tuple[Template, Code]]:
        show = self.options.progress if self.options.lowering is Lowering.INDUCTOR else False
        with bar("compiling stages", total, show) as step:
            for item in work:
                yield item
                step(1)


def _less_margin(free_bytes: int) -> int:
    """What plans may use of free device memory."""
    return free_bytes - int(min(_MARGIN * free_bytes, _MARGIN_BYTES))


def _run(
    schedule: Schedule, passes: Sequence[tuple[str, Callable[[Schedule], Schedule]]]
) -> Schedule:
    for name, function in passes:
        if schedule.draft:
            schedule = function(schedule)
        else:
            schedule = _timed(name, schedule, functools.partial(function, schedule))
    return schedule


class _Captured(NamedTuple):
    """What a pass on the captured graph gives."""

    capture: Capture
    reasons: tuple[str, ...]  # what it did or left, for the plan
    record: PassRecord


def _captured(
    name: str,
    before: Capture,
    function: Callable[[Capture], tuple[Capture, tuple[str, ...]]],
    nodes_before: int,
) -> _Captured:
    start = time.perf_counter()
    after, reasons = function(before)
    record = PassRecord(
        name=name,
        before=_called(before),
        after=_called(after),
        time_s=time.perf_counter() - start,
        nodes=len(after.module.graph.nodes),
    )
    log.pass_done(after.name, record, nodes_before)
    return _Captured(after, reasons, record)


def _called(capture: Capture) -> str:
    """The functions that a captured graph calls, as their nodes are named."""
    return " ".join(n.name for n in capture.module.graph.nodes if n.op.startswith("call_"))


def _timed(
    name: str,
    before: Schedule | None,
    function: Callable[[], Schedule],
    history: tuple[PassRecord, ...] = (),
) -> Schedule:
    start = time.perf_counter()
    after = function()
    record = PassRecord(
        name=name,
        before="" if before is None else _actions(before),
        after=_actions(after),
        time_s=time.perf_counter() - start,
        nodes=sum(len(graph.nodes) for graph in after.graphs.values()),
    )
    history = history if before is None else before.history
    log.pass_done(after.name, record, history[-1].nodes if history else 0)
    return replace(after, history=(*history, record))


def _actions(schedule: Schedule) -> str:
    return "\n".join(ops.actions(graph) for graph in schedule.graphs.values())
