"""What Dynamo gets back for a captured graph: a callable that runs its schedules.

A `CapturedGraph` is called with whatever parameters and shapes come; for each kind of call it
keeps a `Program`: the schedules for it, built at first use. Dynamic shapes are therefore captured
once and specialised here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.capture import (
    Ambient,
    Capture,
    ConstantInput,
    GraphInput,
    Overlap,
    PackedInput,
    ParamInput,
    TensorInput,
    Variant,
)
from megacompile.ir.inputs import inputs as inputs_of
from megacompile.ir.outputs import computed_outputs, expected_tangents
from megacompile.ir.tensors import TensorMeta
from megacompile.packed import is_wrapper, taken_apart
from megacompile.runtime.model.plans import Plans
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params import inputs
from megacompile.runtime.params.eager_notice import share
from megacompile.runtime.params.proxies import StreamedParameter


class Program:
    """The schedules of one capture, built when they are first needed."""

    def __init__(self, capture: Capture, plans: Plans, machine: Machine) -> None:
        self.capture = capture
        self.plans = plans
        self.machine = machine
        with compat.without_saved_tensors_hooks(), compat.without_sources():
            self.stages = plans.compiler.partition(capture)
        outputs, _ = ops.returned(self.stages.forward)
        self.outputs: tuple[Any, ...] = tuple(outputs)
        changes = ops.nodes_of(self.stages.forward, ops.assign)
        self.inputs = inputs_of(self.stages.forward)  # positions, by the name in the schedule
        self.changed = frozenset(  # the inputs that it changes in place, bases among them
            self.inputs[str(node.args[0])] for node in changes
        )
        self.executors: dict[Variant, Executor] = {}
        self.tangents = expected_tangents(self.stages)

    def _meta(self, output: int) -> TensorMeta:
        meta = self.outputs[output].meta["value"]
        assert isinstance(meta, TensorMeta)
        return meta

    def replan(self) -> None:
        """Forget the schedules, and what they were planned from."""
        self.stages = replace(self.stages)
        self.executors.clear()

    def tensor_outputs(self) -> list[int]:
        """Positions of the outputs that stages compute, each value once."""
        return computed_outputs(self.outputs)

    def differentiable(self, output: int) -> bool:
        """Does a graph output require grad? (Also under `no_grad`, if the graph enables it.)"""
        return self._meta(output).requires_grad

    def variant(self, **changes: Any) -> Variant:
        """The variant for the gradients that are expected now.

        Where backwards update, those that do not (`accumulate()`, `torch.autograd.grad`) are few.
        """
        update = self.machine.in_backward is not None
        return replace(Variant(self.tangents, keep_last=True, update=update), **changes)

    def executor(self, variant: Variant) -> Executor:
        """The executor of a variant, built at first use."""
        if variant not in self.executors:
            while len(self.executors) >= PROGRAMS:
                self.executors.pop(next(iter(self.executors)))
            # saved tensors hooks around the call are not the stages'
            with (
                compat.without_saved_tensors_hooks(),
                compat.without_sources(),
                compat.on_host(),
            ):
                schedule = self.plans.build(self.stages, self.capture, variant)
            self.executors[variant] = Executor(schedule, self.machine)
        return self.executors[variant]


def _is_packed(arg: Any) -> bool:
    """Does an argument stand in for a packed parameter: a wrapper over proxies?"""
    if not is_wrapper(arg):
        return False
    return all(isinstance(part, StreamedParameter) for part in taken_apart(arg)[1])


def _taken_apart(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with what packed parameters are made of in their places."""
    parts = [taken_apart(arg)[1] if _is_packed(arg) else [arg] for arg in args]
    return tuple(part for each in parts for part in each)


def _fetched(arg: Any) -> Any:
    """A view of a parameter that eager code made, on the device; anything else as it is."""
    return arg.clone() if isinstance(arg, StreamedParameter) and arg.is_view else arg


SHAPES_AT_ONCE = 8  # inference shapes that are scheduled when they first come


SHAPES_MET = 4096  # inference shapes that are known to have come once


PROGRAMS = 256  # of a captured graph; those that were called longest ago go


class CapturedGraph:
    """One graph that Dynamo captured, as a callable of its inputs."""

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        plans: Callable[[], Plans],
        machine: Machine,
        run: Callable[[Program, Sequence[Any]], Sequence[Any]],
        evicted: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.module = module
        self.current_plans = plans
        self.plans = plans()
        self.machine = machine
        self.run = run
        self.evicted = evicted  # called when programs were given up
        self.programs: dict[Hashable, Program | None] = {}
        self.stale = False  # are they to be made anew, because buckets have moved?
        self.changed: frozenset[int] = frozenset()  # the inputs that a program changes in place
        self._met: set[Hashable] = set()
        self._called: dict[Hashable, None] = {}  # keys of the programs, the last one called last

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.current_plans() is not self.plans:  # buckets were laid out anew
            self.plans = self.current_plans()
            self.stale = True
        if self.stale:
            self.programs.clear()
            self._called.clear()
            self.stale = False
        args = tuple(map(_fetched, args))
        whole, args = args, _taken_apart(args)
        ambient = Ambient.current(self.machine.device)
        program = self._program(ambient, args, whole)
        if program is None:
            result: Sequence[Any] = self.module(*whole)
            return result
        if program.capture.overlaps:
            args = (*args, *inputs.bases(args, program.capture.overlaps))
        return self.run(program, args)

    def _program(
        self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]
    ) -> Program | None:
        """The program for a call; None where it runs in eager mode.

        Args:
            args: what goes into a schedule.
            whole: what goes into the captured graph: packed parameters are not taken apart.
        """
        key = self._call_key(ambient, args)
        if key not in self.programs and self._worth_a_program(ambient, key):
            program = self._build(ambient, args, whole)
            key = self._call_key(ambient, args)  # by now it is known which inputs are changed
            self.programs[key] = program
            self._evict()
        if key in self.programs:
            self._called.pop(key, None)
            self._called[key] = None
        return self.programs.get(key)

    def _evict(self) -> None:
        """Let the programs go that were called longest ago, where there are too many."""
        if len(self.programs) <= PROGRAMS:
            return
        for key in list(self._called)[: len(self.programs) - PROGRAMS]:
            del self._called[key], self.programs[key]
        self.evicted()

    def _call_key(self, ambient: Ambient, args: Sequence[Any]) -> Hashable:
        return (ambient, self._overlaps(args), *(self._key(arg) for arg in args))

    def _overlaps(self, args: Sequence[Any]) -> tuple[Overlap, ...]:
        """What inputs share memory with an input that is changed in place."""
        if not self.changed:
            return ()
        parameters = [b.values[0] for b in self.machine.buckets.values() if b.values]
        return inputs.overlaps(args, self.changed, parameters)

    def _worth_a_program(self, ambient: Ambient, key: Hashable) -> bool:
        """Inference on ever new shapes (generation) runs in eager mode until a shape recurs."""
        if ambient.grad_enabled or len(self.programs) < SHAPES_AT_ONCE or key in self._met:
            return True
        if len(self._met) >= SHAPES_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def _key(self, arg: Any) -> Hashable:
        if isinstance(arg, StreamedParameter):
            bucket, index = self.machine.place(arg)
            return (bucket.key, index, arg.requires_grad)
        if isinstance(arg, torch.Tensor):
            return TensorMeta.of(arg)
        return (type(arg), arg)

    def _input(self, arg: Any) -> GraphInput:
        if isinstance(arg, StreamedParameter):
            return self._param_input(arg)
        if _is_packed(arg):
            wrapping, parts = taken_apart(arg)
            return PackedInput(wrapping, tuple(self._param_input(part) for part in parts))
        if type(arg) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            if arg.layout is not torch.strided:
                raise UnsupportedGraphError(f"an input has layout {arg.layout}")
            return TensorInput(TensorMeta.of(arg))
        if isinstance(arg, (int, float, bool)):
            return ConstantInput(arg)
        raise UnsupportedGraphError(f"an input is a {type(arg).__name__}")

    def _param_input(self, proxy: torch.Tensor) -> ParamInput:
        assert isinstance(proxy, StreamedParameter)
        return ParamInput(*self.machine.place(proxy), proxy.requires_grad)

    def _build(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Program | None:
        try:
            if transform := compat.transforms(self.module):
                raise UnsupportedGraphError(f"it uses torch.func ({transform})")
            program = self._divided(ambient, args, whole)
            if not program.changed <= self.changed:
                self.changed |= program.changed
                if self._overlaps(args) != program.capture.overlaps:
                    program = self._divided(ambient, args, whole)
            program.executor(program.variant())
        except UnsupportedGraphError as error:
            warnings.warn(
                f"megacompile: {self.name} is not scheduled and runs in eager mode, fetching "
                f"{self._share(args)} at each use (slower, same numbers): {error}",
                stacklevel=2,
            )
            return None
        return program

    def _share(self, args: Sequence[Any]) -> str:
        """How much of the model the graph reads."""
        params = [param for bucket in self.machine.buckets.values() for param in bucket.params]
        return share(params, (id(a.param) for a in args if isinstance(a, StreamedParameter)))

    def _divided(self, ambient: Ambient, args: Sequence[Any], whole: Sequence[Any]) -> Program:
        """A program for a call, with stages and no schedule yet."""
        kinds = tuple(self._input(arg) for arg in whole)
        overlaps = self._overlaps(args)
        capture = Capture(self.name, self.module, kinds, self.machine.device, ambient, overlaps)
        return Program(capture, self.plans, self.machine)
