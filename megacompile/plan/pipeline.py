"""Runs the passes in order, from a captured graph and a `Choice` to a schedule.

partition        capture            ->  stages
differentiated   stages             ->  forward and backward, the input of the search for a plan
planned          those, and Choice  ->  the schedule with a plan, saved tensors and movement
lowered          the schedule       ->  with code
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from megacompile import log
from megacompile.cost.places import stored_bytes
from megacompile.ir import ops
from megacompile.ir.buckets import Unit
from megacompile.ir.capture import Capture, PassRecord, Variant
from megacompile.ir.plan import Choice, Plan, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Template
from megacompile.options import Lowering
from megacompile.passes.capture import calls
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.chunk import chunk_head
from megacompile.passes.capture.propagate import propagate
from megacompile.passes.schedule import updates
from megacompile.passes.schedule.differentiate import (
    bundles_of,
    differentiate,
    split_stages,
    stages_in_tiles,
)
from megacompile.passes.schedule.free import insert_free, insert_tokens
from megacompile.passes.schedule.insert_collectives import (
    delay_reduced,
    insert_all_gather,
    insert_all_reduce,
    insert_reduce_scatter,
)
from megacompile.passes.schedule.insert_disk import (
    insert_disk,
    insert_disk_saved,
    insert_disk_weights,
)
from megacompile.passes.schedule.make_plan import make_plan
from megacompile.passes.schedule.prefetch import assign_slots, insert_prefetch
from megacompile.passes.schedule.saved_values import (
    insert_recompute,
    insert_reruns,
    offload_saved_tensors,
)
from megacompile.passes.stages.lower import CodeToCome, lower
from megacompile.passes.stages.partition import partition
from megacompile.passes.stages.strides import settle_strides
from megacompile.passes.stages.templates import TemplateCache, trace_templates
from megacompile.plan.setting import Setting

_REMEMBERED = 8  # captures, with their stages


class Planned(NamedTuple):
    """A captured graph's stages, and the variant that its schedule is built for."""

    stages: Schedule
    capture: Capture
    variant: Variant


class Pipeline:
    """The passes, bound to the options; new templates are added to `templates`."""

    def __init__(
        self, setting: Setting, units: tuple[Unit, ...], templates: TemplateCache | None = None
    ) -> None:
        self.setting = setting
        self.units = units
        self.templates: TemplateCache = {} if templates is None else templates
        self.to_come = CodeToCome(setting.options.device)
        self._partitioned: list[tuple[tuple[Capture, bool], Schedule]] = []  # the latest

    def partition(self, capture: Capture, *, whole: bool = False) -> Schedule:
        """Divide a graph into stages, or into one if `whole`; cached, because a call starts over
        after buckets have moved."""
        key = (capture, whole)
        found = next((stages for before, stages in self._partitioned if before == key), None)
        if found is None:
            found = self._stages_of(capture, whole)
            self._partitioned = [*self._partitioned[-(_REMEMBERED - 1) :], (key, found)]
        return replace(found)

    def _stages_of(self, capture: Capture, whole: bool) -> Schedule:
        options = self.setting.options
        passes: list[_Pass] = [
            ("checkpoints", calls.inline_checkpoints),
            ("unpack", calls.unpack),
            ("numbers", calls.take_numbers),
            ("vmaps", calls.fold_vmaps),
            ("experts", functools.partial(calls.take_grouped_products, device=options.device)),
        ]
        if options.compute_dtype is not None:
            widen = functools.partial(calls.widen_losses, compute_dtype=options.compute_dtype)
            passes.append(("losses", widen))
        capture = _run(capture, passes)
        values, lowering = propagate(capture), options.lowering
        causal = functools.partial(use_causal_attention, values=values, lowering=lowering)
        chunk = functools.partial(chunk_head, values=values, lowering=lowering, head=options.head)
        cut = functools.partial(partition, values=values, units=self.units, whole=whole)
        passes = [("causal", causal), ("chunk", chunk), ("partition", cut)]
        if lowering is Lowering.EAGER:
            passes.append(("strides", functools.partial(settle_strides, ambient=capture.ambient)))
        made: Any = capture  # and then its stages
        stages: Schedule = _run(made, passes)
        counts = len(capture.inputs), capture.device, len(stages.stages)
        text = "%s: %d inputs on %s, %d stages"
        log.logger("capture").info(text, capture.name, *counts)
        return stages

    def differentiated(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """Run the passes before the choice of a plan."""
        trace = functools.partial(
            trace_templates,
            ambient=capture.ambient,
            cache=self.templates,
            lowering=self.setting.options.lowering,
        )
        schedule = replace(stages, tangents=variant.tangents)
        return _run(schedule, [("templates", trace), ("differentiate", differentiate)])

    def planned(
        self,
        schedule: Schedule,
        variant: Variant,
        choice: Choice,
        reasons: tuple[str, ...] = (),
        *,
        draft: bool = False,
    ) -> Schedule:
        """Run the passes after the choice of a plan, on a schedule from `differentiated`:
        `with_plan`, `saving`, `moving`. A draft is for simulation only."""
        schedule = replace(schedule, draft=draft)
        schedule = self.with_plan(schedule, variant, choice, reasons)
        return self.moving(self.saving(schedule), variant, choice)

    def bundled(self, schedule: Schedule, variant: Variant, tiles: int) -> Schedule:
        """Prepare the output of `differentiated` for drafts: each stage saves as few values as
        possible and runs in `tiles` tiles."""
        planned = replace(schedule, draft=True)
        planned = self.with_plan(planned, variant, Choice(0, tiles=tiles))
        return replace(self._split(planned, bundle=True), plan=schedule.plan)

    def _split(self, schedule: Schedule, *, bundle: bool) -> Schedule:
        fused = self.setting.options.lowering is Lowering.INDUCTOR
        bundles = functools.partial(bundles_of, fused=fused) if bundle else None
        split = functools.partial(split_stages, cache=self.templates, bundles=bundles)
        return _run(schedule, [("split", split)])

    def saving(self, schedule: Schedule, *, bundle: bool = False) -> Schedule:
        """Insert what backwards need from forwards: saved tensors are kept, recomputed, or wait
        elsewhere. Depends only on `Choice.computing`. With `bundle`, the schedule is a draft from
        `bundled`."""
        lookahead = self.setting.options.lookahead
        offload = functools.partial(offload_saved_tensors, lookahead=lookahead)
        made = self._split(schedule, bundle=bundle)
        if made.draft and made.forward is schedule.forward:
            made = made.fresh()
        passes = [("recompute", insert_recompute), ("rerun", insert_reruns)]
        return _run(made, [*passes, ("offload_saved", offload)])

    def moving(self, schedule: Schedule, variant: Variant, choice: Choice) -> Schedule:
        """Insert the movement of weights, gradients and states, after `saving`."""
        options = self.setting.options
        slots = options.least_slots
        if options.ranks > 1 and options.optimizer is not None:
            slots += 1  # updates run a stage later: see `delay_reduced`
            slots += options.replicas > 1 and variant.accumulate and variant.update  # or two later
        if choice.stay:
            slots = options.lookahead + 1  # and one for each bucket that stays
        plan, cost = schedule.plan, self.setting.cost()
        disk = functools.partial(
            insert_disk,
            state_bytes=cost.states_of,
            set_bytes=lambda bucket, trained: stored_bytes(bucket, trained, cost),
        )
        reduce = functools.partial(insert_reduce_scatter, rank=options.rank)
        return _run(
            schedule,
            [
                *([("disk_saved", insert_disk_saved)] if plan.saved_on_disk else []),
                *self._with_ranks(("reduce_scatter", reduce)),
                *self._gradient_passes(choice, variant),
                *([("disk", disk)] if plan.on_disk else []),
                *self._with_ranks(("delay_reduced", delay_reduced)),
                ("prefetch", functools.partial(insert_prefetch, lookahead=options.lookahead)),
                ("slots", functools.partial(assign_slots, slots=slots, reuse=variant.reuse)),
                *([("disk_weights", insert_disk_weights)] if plan.weights_on_disk else []),
                *self._with_ranks(("all_gather", insert_all_gather)),
                ("free", insert_free),
                ("tokens", insert_tokens),
            ],
        )

    def with_plan(
        self,
        schedule: Schedule,
        variant: Variant,
        choice: Choice,
        reasons: tuple[str, ...] = (),
    ) -> Schedule:
        """Add the plan that the choice and the options determine."""
        options = self.setting.options
        share = choice.device_update if options.device_update is None else options.device_update
        choice = replace(
            choice,
            device_update=0.0 if variant.defers else share,  # no step follows
            tiles=choice.tiles if options.tiles is None else options.tiles,
            saved_on_disk=len(schedule.stages) if options.disk_saved else choice.saved_on_disk,
        )
        if options.disk_weights:
            keys = {b.key for b in schedule.buckets} - choice.places.resident
            choice = replace(choice, places=choice.places.changed(keys, weights=Tier.DISK))
        cut = stages_in_tiles(schedule, choice.tiles, self.templates)
        plan = functools.partial(
            make_plan,
            choice=choice,
            saves=variant.keep_last,
            in_backward=variant.update,
            activations=options.activations.value,
            lookahead=options.lookahead,
            cut=cut,
        )
        schedule = replace(schedule, plan=Plan(reasons=(*schedule.plan.reasons, *reasons)))
        return _run(schedule, [("plan", plan)])

    def _gradient_passes(self, choice: Choice, variant: Variant) -> list[_Pass]:
        """The passes that offload gradients or update parameters with them."""
        options = self.setting.options
        cost = self.setting.cost()
        every = functools.partial(insert_all_reduce, defers=variant.defers)
        reduce = self._with_ranks(("all_reduce", every)) if options.replicas > 1 else []
        if variant.update:
            insert = functools.partial(
                updates.insert_updates,
                accumulate=variant.accumulate,
                lookahead=choice.state_lookahead or options.lookahead,
                masters=options.compute_dtype is not None,
                updated_bytes=cost.updated_of,
                state_bytes=cost.states_of,
            )
            return [("update_in_backward", insert), *reduce, ("norms", updates.insert_norms)]
        step = functools.partial(updates.insert_update_graph, helps=cost.helped)
        offload = functools.partial(updates.offload_gradients, accumulate=variant.accumulate)
        give = functools.partial(updates.insert_device_update, state_bytes=cost.updated_of)
        fused = options.lowering is Lowering.INDUCTOR
        # ranks need norms in eager too: torch's clipping runs a collective, which would hang if a
        # rank failed
        norms = fused or options.ranks > 1
        return [
            ("offload_grad", offload),
            *reduce,
            *([("norms", updates.insert_norms)] if norms else []),
            *([("device_update", give)] if fused else []),
            ("update_graph", step),
        ]

    def _with_ranks(self, one: _Pass) -> list[_Pass]:
        """The pass, if ranks share the model; else none."""
        return [one] if self.setting.options.ranks > 1 else []

    def lowered(self, schedule: Schedule, *, waits: bool = True) -> Schedule:
        """Lower a schedule's templates to code; with `waits`, wait until that is compiled."""
        code = functools.partial(
            lower,
            lowering=self.setting.options.lowering,
            progress=self.setting.options.progress,
            to_come=self.to_come,
            waits=waits,
        )
        return _run(schedule, [("lower", code)])

    def retain(self, schedules: Collection[Schedule]) -> None:
        """Forget the templates that none of these schedules uses."""
        used = {template for schedule in schedules for template in schedule.templates}
        for key, template in reversed(list(self.templates.items())):
            if template in used and isinstance(key, tuple) and isinstance(key[0], Template):
                used.add(key[0])  # the template that it was derived from
        for key in [key for key, template in self.templates.items() if template not in used]:
            del self.templates[key]


_Pass = tuple[str, Callable[[Any], Any]]
_Made = TypeVar("_Made", Capture, Schedule)


def _run(given: _Made, passes: Sequence[_Pass]) -> _Made:
    """Run passes, each a name and a function. Their inputs, outputs and times go to the history and
    to the log, except a draft's: it is only simulated, and there are many of them."""
    for name, function in passes:
        if isinstance(given, Schedule) and given.draft:
            given = function(given)
            continue
        was, start = _actions(given), time.perf_counter()
        after: _Made = function(given)
        time_s = time.perf_counter() - start
        graphs = [after.module.graph] if isinstance(after, Capture) else after.graphs.values()
        nodes = sum(len(graph.nodes) for graph in graphs)
        record = PassRecord(name, was, _actions(after), time_s, nodes)
        log.pass_done(after.name, record, given.history[-1].nodes if given.history else 0)
        given = replace(after, history=(*given.history, record))
    return given


def _actions(of: Schedule | Capture) -> str:
    """The actions of a schedule, or the names of the call nodes of a captured graph."""
    if isinstance(of, Capture):
        return " ".join(n.name for n in of.module.graph.nodes if n.op.startswith("call_"))
    return "\n".join(ops.actions(graph) for graph in of.graphs.values())
