"""Runs a schedule's generated Python code, with its ops bound to a device.

The code that `print(schedule)` shows is compiled unchanged; its names are the methods of `BoundOps`
and the schedule's own stages, buckets and slots.
"""

from __future__ import annotations

import functools
import linecache
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import ParamId
from megacompile.ir.edges import Collectives, token_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ParamRef
from megacompile.ir.stream import Stream
from megacompile.ir.values import borrowed, elsewhere, left_of, tangents_of
from megacompile.runtime.device.replay import captured
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.compute import ComputeOps, UpdateOps
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.ops.streaming import StreamingOps
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.swap import Undos, hold, undone
from megacompile.runtime.updates.update import BucketUpdate, UpdatePlace
from megacompile.views import python

_PLACE = operator.attrgetter("place")


class BoundOps(StreamingOps, ComputeOps, UpdateOps):
    """The ops of one graph of a schedule, bound to a machine."""


class Executor:
    """The compiled functions of one schedule."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.schedule = schedule
        self.machine = machine
        machine.device_update.keys |= schedule.plan.device_update
        self._inputs = {
            name: [(node.name, token_of(node)) for node in graph.find_nodes(op="placeholder")]
            for name, graph in schedule.graphs.items()
        }
        self.backward_inputs = [k for k, token in self._inputs.get("backward", ()) if token is None]
        self._order = [bucket.key for bucket in schedule.buckets]
        self.elsewhere = elsewhere(schedule.forward)
        self.borrowed = borrowed(schedule)
        self.tangents = {} if schedule.backward is None else tangents_of(schedule.backward)
        self.constants_in = {name: _constants(graph) for name, graph in schedule.graphs.items()}
        self.constants = {k: v for found in self.constants_in.values() for k, v in found.items()}
        self._left = list(left_of(schedule))
        self._fills = {name: _filled(graph) for name, graph in schedule.graphs.items()}
        self._alone = {
            n: not ops.nodes_that(g, ops.leaves_compute) for n, g in schedule.graphs.items()
        }
        stay = schedule.reused if schedule.backward is None else ()
        self._stay_from = min((i for i, _ in stay), default=None)
        self._stays = [(i, b.key) for i, b in stay if i in self._fills["forward"]]
        # the op that updates each bucket, by key
        self.updates: dict[int, Callable[..., Any]] = {}
        if schedule.update is not None:
            nodes = ops.nodes_that(schedule.update, lambda op: op.is_update)
            self.updates = {ops.arguments(node)[0].key: node.target for node in nodes}  # type: ignore[misc]
        if machine.staging is not None:
            machine.staging.require(schedule.plan, machine.buckets.values())
        kinds = schedule.graphs.items() if machine.ranks is not None else ()
        self._collectives = {n: Collectives.of(g, n, schedule.name) for n, g in kinds}
        self._bound = {name: BoundOps(schedule, machine) for name in schedule.graphs}
        self._run = {name: self._compile(name) for name in schedule.graphs}
        if schedule.stages and captured(machine.replays) >= 2 * schedule.plan.cuda_graphs:
            machine.forget_graphs()  # the plan has no room for them
        self._recorded: dict[str, Callable[[list[Any]], Any]] = {}  # built at first use
        self._tuned = False  # True after the first backward, which tunes kernels

    def _compile(
        self, name: str, bind: Callable[[BoundOps, ops.Op], Callable[..., Any]] | None = None
    ) -> Callable[[list[Any]], Any]:
        """A graph's code; its ops are the methods of `BoundOps`, or what `bind` makes of them."""
        bound, source = self._bound[name], python.graph_code(self.schedule, name)
        filename = f"<megacompile {self.schedule.name} {name} {id(self)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None)
        namespace: dict[str, Any] = {
            op.name: bind(bound, op) if bind else getattr(bound, op.name) for op in ops.OPS.values()
        }
        namespace |= {"wait": bound.wait, **python.names(self.schedule)}
        exec(compile(source, filename, "exec"), namespace)
        function: Callable[[list[Any]], Any] = namespace[f"run_{name}"]
        return function

    @functools.cached_property
    def read_in_backward(self) -> frozenset[ParamId]:
        """The parameters that the backward reads, and those that it leaves on the device."""
        backward, plan = self.schedule.backward, self.schedule.plan
        read = set() if backward is None else set(_read(backward))
        left = [b for b in self.schedule.buckets if b.key in plan.device_update]
        return frozenset(read | {(b.key, i) for b in left for i in range(len(b.params))})

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Run the forward; returns the outputs and the saved values, by name. A host parameter may
        be changed as soon as this returns: the last prefetch is done."""
        marks = self._marks() if self._stays else {}
        outputs, saved_values = self._call("forward", inputs)
        self.machine.streams.synchronize(Stream.H2D)
        if self.machine.ranks is not None:
            self.machine.ranks.agreement.check()  # the awaited work may have been aborted
        self.machine.alive.clear()
        self.machine.slots.left |= marks
        if self.schedule.backward is not None:
            self.machine.order[:] = self._order
        kept = dict(zip(self.schedule.saved_values, _plain(saved_values), strict=True))
        return _alone(_plain(outputs)), kept

    def _marks(self) -> dict[int, tuple[int, Callable[[], bool]]]:
        """The buckets that a forward without a backward leaves for the next forward, by slot."""
        with unguarded():
            each = [(i, key, self.machine.buckets[key].pending.mark()) for i, key in self._stays]
        return {i: (key, mark) for i, key, mark in each if mark is not None}

    def is_left(self) -> bool:
        """True if the slots hold the buckets that the previous forward left for this one."""
        if self.schedule.backward is not None or not self.schedule.reused:
            return False
        with unguarded():
            return self.machine.slots.has(self.schedule.reused)

    def backward(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run the backward; returns the gradients of graph inputs, by the placeholder's name."""
        found, left, _ = self._call("backward", inputs)
        if self._left:
            self._leave(left)
        if not self._tuned:
            compat.release_pinned_cache(self.machine.device)
            self._tuned = True
        self.machine.note_backward(self)
        return dict(zip(self.schedule.gradients, _plain(found), strict=True))

    def update(self, parts: Mapping[int, BucketUpdate]) -> None:
        """Run the update of the buckets that take part in a step, by key; consumes what the
        backward left on the device for them. Ctrl-C may arrive anywhere in it, so nothing around
        the ops keeps state that an interrupt could leave inconsistent."""
        undone(functools.partial(self._update, parts))

    def _update(self, parts: Mapping[int, BucketUpdate], undos: Undos) -> None:
        hold(self.machine.running, undos)  # forwards in other threads use the same streams
        values: list[Any] = []
        for key in self._left:
            left = parts[key].left if key in parts else None
            values += (None, None) if left is None else (left.gradients, left.buffers)
        given = dict(zip(self.schedule.left, values, strict=True))
        bound = self._bound["update"]
        bound.in_step, bound.parts, bound.residents = True, parts, []
        places = map(_PLACE, parts.values())
        bound.resident_parts = operator.countOf(places, UpdatePlace.RESIDENT)
        try:
            with self.machine.streams.run():
                self._run_graph("update", given)
        finally:
            bound.parts = {}

    def _leave(self, left: Sequence[Handle]) -> None:
        """Offer what the backward left on the device to the next step; if that could not use it,
        the memory is freed after the copies out of it."""
        machine, trained = self.machine, self.schedule.gradient_params
        run = machine.run
        for key, gradients, buffers in zip(self._left, left[::2], left[1::2], strict=True):
            host = machine.buckets[key]
            final = all(run.is_final(key, i) for i in trained[key])
            if final and machine.device_update.keep(host, gradients, buffers):
                continue
            copied = host.pending.gradients_copied
            for value, event in ((gradients.value, copied), (buffers.value, buffers.event)):
                if event is not None:
                    machine.defer_free(value, event)

    def _call(self, name: str, inputs: dict[str, Any]) -> Any:
        machine = self.machine
        quiet = compat.without_autocast()  # code traced under autocast contains its casts
        running, ranks = machine.streams.run(), machine.ranks
        agreed = nullcontext() if ranks is None else ranks.agreement.run(self._collectives[name])
        with agreed, running, torch.no_grad(), quiet, compat.on_host():
            machine.slots.require(self.schedule.slots)
            if self._stay_from is not None:
                machine.slots.stay_from = self._stay_from
            for index in self._fills[name]:
                machine.slots.left.pop(index, None)
            machine.slots.generation += 1
            return self._run_graph(name, inputs)

    def _run_graph(self, name: str, inputs: dict[str, Any]) -> Any:
        """Run a graph's code; empties `inputs`, so that no reference remains."""
        machine, bound, taken = self.machine, self._bound[name], []
        machine.streams.alone = self._alone[name]
        for key, token in self._inputs[name]:
            if token is None:
                taken.append(inputs.pop(key))  # no local name, which would keep the value alive
                if type(taken[-1]) is not Handle:
                    taken[-1] = Handle(taken[-1], Stream.COMPUTE)
            else:
                pending = machine.buckets[token.bucket.key].pending
                taken.append(pending.last_write(token.part))
        inputs.clear()
        tracer = machine.tracer
        bound.recording = None if tracer is None else tracer.run(self.schedule, name)
        bound.to_write.clear()  # of a run that failed
        function = self._run[name]
        if bound.recording is not None or compat.profiler_enabled():
            if name not in self._recorded:
                self._recorded[name] = self._compile(name, recorded)
            function = self._recorded[name]
        try:
            results = function(taken)
            if bound.to_write:
                bound.write_assigned()
            return results
        except BaseException as error:
            machine.give_up(error)
            raise


def _read(graph: fx.Graph) -> Iterator[ParamId]:
    for call in ops.nodes_of(graph, ops.recompute, ops.rerun, ops.backward):
        stage = ops.arguments(call)[0]
        primals: Sequence[int] = range(len(stage.primals))
        if call.target is ops.recompute:
            primals = stage.traced.recompute_primals
        elif call.target is ops.backward:
            primals = stage.traced.backward_primals
        for ref in (stage.primals[i] for i in primals):
            if isinstance(ref, ParamRef):
                yield stage.buckets[ref.bucket].key, ref.param


def _filled(graph: fx.Graph) -> list[int]:
    fills = ops.nodes_that(graph, lambda op: op.fills_slot)
    slots = [ops.arguments(node)[ops.effects(node).slot] for node in fills]  # type: ignore[index]
    return sorted({slot.index for slot in slots})


def _constants(graph: fx.Graph) -> dict[str, torch.Tensor]:
    """The constant tensors in the code of a graph's stages, under unique names."""
    calls = ops.nodes_of(graph, ops.forward, ops.recompute, ops.rerun, ops.backward)
    codes = {(ops.arguments(call)[0].traced, ops.code_of(call)) for call in calls}
    found: dict[str, torch.Tensor] = {}
    modules = (template.graphs[code] for template, code in codes if code in template.graphs)
    for module in modules:
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(module)
            if isinstance(value, torch.Tensor):
                found[f"constant {id(value)}"] = value
    return found


def _alone(outputs: Sequence[Any]) -> list[Any]:
    """The outputs as base tensors instead of views, except outputs that share memory: autograd
    forbids in-place changes of one of several outputs that are views."""
    memory: dict[int, int] = {}
    for value in outputs:
        if isinstance(value, torch.Tensor):
            memory[id(value)] = value.untyped_storage().data_ptr()
    users = Counter(memory.values())
    return [v.detach() if users[memory.get(id(v), -1)] == 1 else v for v in outputs]


def _plain(values: Iterable[Any]) -> list[Any]:
    """The values of handles; other values unchanged."""
    return [value.value if type(value) is Handle else value for value in values]


def recorded(bound: BoundOps, op: ops.Op) -> Callable[..., Any]:
    """An op that shows in a trace, and as a range in `torch.profiler`, while these are on. The
    range has the op's printed name after a space: the profiler's tables take "1F" for a mangled C++
    name and would print "F"; "2F " would become "F "."""
    function = getattr(bound, op.name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if bound.recording is not None and op.issues:
            bound.recording.next_op()
        if not compat.profiler_enabled():
            return function(*args, **kwargs)
        with torch.profiler.record_function(f" {op.label(args)}"):
            return function(*args, **kwargs)

    return run
