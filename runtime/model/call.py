"""One call of a program: its forward, the tensors saved for its backward, and the backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from megacompile import compat, progress
from megacompile.errors import BackwardError, DeviceMemoryError
from megacompile.ir.buckets import ParamId
from megacompile.ir.capture import Variant
from megacompile.ir.tensors import has_numbers
from megacompile.progress import line
from megacompile.runtime.device.pool import converted
from megacompile.runtime.model import autograd_nodes
from megacompile.runtime.model.autograd_nodes import CapturedNode, Gate, Source
from megacompile.runtime.model.program import Program, first_line
from megacompile.runtime.ops.compute import random_numbers_of, random_state
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.backward_pass import Wish
from megacompile.runtime.params.gradient_run import GradientRun
from megacompile.runtime.params.parameter_gradients import Users, users_of
from megacompile.runtime.params.proxies import Link, StreamedParameter

_ROOT = attrgetter("root")


def run(program: Program, args: Sequence[Any]) -> list[Any]:
    """Call a program with a captured graph's inputs; returns the graph's outputs. In-place changes
    of the graph are visible afterwards, to autograd too."""
    call = Call(program, args)
    if program.differentiable:
        with torch.enable_grad():  # the graph itself may
            trained = [k for k in program.tensors if args[k].requires_grad]
            computed = compat.apply(
                CapturedNode, call, call.gates(), trained, *map(args.__getitem__, trained)
            )
    else:
        computed = call.forward()
    if len(computed) > 1:
        each = zip(program.computed, computed, strict=True)
        watched = {k: weakref.ref(t) for k, t in each if t.requires_grad}
        call.outputs = watched if len(watched) > 1 else {}
    nodes = map(program.outputs.__getitem__, program.computed)
    by_node = dict(zip(nodes, computed, strict=True))
    inputs = call.inputs_by_name

    for position, k in program.recorded:
        tensor, new = args[position], by_node[program.outputs[k]]
        # it has its new value already; gradients of later uses go through this graph. A leaf that
        # requires grad gets no history: it can only have been changed outside of autograd
        if new.requires_grad and not (tensor.is_leaf and tensor.requires_grad):
            with torch.enable_grad():
                tensor.copy_(new)
    count = len(program.outputs) - len(program.recorded)
    outputs: list[Any] = []
    for node in program.outputs[:count]:
        if not isinstance(node, fx.Node):
            outputs.append(program.number(node, args) if has_numbers(node) else node)
        else:
            outputs.append(inputs[node.name] if node.op == "placeholder" else by_node[node])
    for k, view in program.stages.input_views:
        shape, stride, offset = program.number((view.shape, view.stride, view.offset), args)
        base = outputs[k]
        if base.requires_grad and not view.requires_grad:
            base = base.detach()
        with torch.enable_grad():  # autograd refuses to change a `no_grad` view in place
            outputs[k] = base.as_strided(shape, stride, base.storage_offset() + offset)
    if program.stages.views:
        program.views = [(weakref.ref(outputs[k]), name) for k, name in program.stages.views]
    return outputs


class Call:
    """One forward of a program, with the tensors saved for its backward."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.program = program
        self.machine: Machine = program.machine
        self.variant = program.variant()
        given = map(args.__getitem__, program.inputs.values())
        self.inputs_by_name = dict(zip(program.inputs, given, strict=True))
        self.places = program.places
        self.streamed: list[StreamedParameter] = list(map(args.__getitem__, program.streamed))
        self.values = list(map(args.__getitem__, program.numbers))
        self.saved_values: dict[str, Any] | None = None
        self.shared: list[Source] = []  # the tensors whose storage they alias
        self.observed = compat.ddp_around() is not None
        self.outputs: dict[int, weakref.ref[torch.Tensor]] = {}  # see `warn_of_hooks`
        self._handed: dict[int, dict[ParamId, torch.Tensor]] = {}  # from the backward to the gates

    def gates(self) -> torch.Tensor | None:
        """Create the gates; returns the node's link to them, None if nothing is trained. Each
        parameter has its own gate if a hook waits for a gradient."""
        gradients = self.machine.gradients
        while self.places:
            hooked = gradients.ends(self.places).hooked()
            # on this device, for autograd's stream
            token = torch.empty(0, device=self.machine.device)
            for group in [(place,) for place in self.places] if hooked else [self.places]:
                token = compat.apply(Gate, self, group, token, *gradients.ends(group).params)
            if not gradients.follow(self.places, autograd_nodes.accumulate_nodes(token)):
                return token
            # otherwise create them again: new nodes may have other hooks
        return None

    @compat.opaque
    def gradients_for(self, places: Sequence[ParamId]) -> list[torch.Tensor | None]:
        """The gradients that a gate returns; the call no longer references them."""
        number = compat.backward_id()
        handed = self._handed.get(number, {})
        found = list(map(handed.pop, places, repeat(None)))
        if not handed:
            self._handed.pop(number, None)
        return found

    def forward(self, *, recorded: bool = False) -> list[torch.Tensor]:
        """Run the forward schedule; returns the computed outputs, each once. `recorded`: autograd
        holds this call, and a backward may follow."""
        with self.machine.running:
            self.machine.gradients.forget()
            self.random = random_state(self.machine.device)
            outputs = self._compute()
        computed = list(map(outputs.__getitem__, self.program.computed))
        if not recorded:
            return computed
        self.machine.pending.add(self)
        self.buckets = self.machine.gradients.buckets
        self._roots = list(map(_ROOT, self.streamed))
        self.param_versions = list(map(compat.version, self._roots))
        return computed

    def _compute(self) -> list[Any]:
        executor = self.program.executor(self.variant)
        if executor.is_left():
            executor = self.program.executor(replace(self.variant, reuse=True))
        changed, constants = self.program.changed_names, executor.constants
        inputs, given = self.inputs_by_name, dict(self.inputs_by_name)
        before = autograd_nodes.versions([*map(inputs.__getitem__, changed), *constants.values()])
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                given[name] = value.detach()
        outputs, saved = executor.forward(given)
        if executor.schedule.backward is not None:
            self.shared = autograd_nodes.shared(
                saved, inputs, changed, constants, before, outputs, executor.borrowed
            )
        self.saved_values = saved
        self.generation = self.machine.slots.generation
        return outputs

    @compat.opaque
    def backward(
        self, node: object, given: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Run the backward schedule on the outputs' gradients; returns the inputs' gradients, by
        position. The gates return those of parameters."""
        tangents = {}
        for k, gradient in zip(self.program.computed, given, strict=True):
            if gradient is not None and k in self.program.differentiable:
                tangents[k] = gradient
        if not tangents:
            return {}
        if self.outputs:
            autograd_nodes.warn_of_hooks(self.program, self.outputs, tangents)
        with self.machine.running:
            self._check(tuple(tangents))
            # consumers of the parameters' gradients in this backward, and other producers
            found: list[Users] = []
            for each in compat.backward_calls():
                if each.users is None:
                    each.users = users_of(each, CapturedNode, Gate, Link)
                if node in each.users.nodes:
                    found.append(each.users)
            gradients, show = self.machine.gradients, self.machine.progress
            run = GradientRun(gradients, self.places, found, observed=self.observed)
            self.machine.run = run
            is_later = self.program.ran_backward or self.machine.steps
            try:
                with nullcontext() if is_later else line("running the first backward", show):
                    of_inputs = self._attempts(tangents)
                of_params = run.for_autograd()
            finally:
                self.machine.run = None
        if self.saved_values is None:
            self.inputs_by_name = {}  # a reference to the loss keeps this call alive
        self.program.ran_backward = True
        self._handed[compat.backward_id()] = of_params
        return {self.program.inputs[name]: gradient for name, gradient in of_inputs.items()}

    def _attempts(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        ran_out = ""
        while True:
            try:
                if ran_out:
                    self._start_again(ran_out)
                return self._attempt(dict(tangents))
            except torch.OutOfMemoryError as error:
                ran_out = first_line(error)  # drop the error: its frames hold memory

    def _start_again(self, ran_out: str) -> None:
        """Repeat the forward with a plan that needs less; gradients on the host stay there."""
        program, run = self.program, self.machine.run
        self.saved_values = None
        why = ""
        if program.changed:
            why = "it changes buffers"
        elif self._updates():
            why = "it updates parameters"
        elif any(call is not self for call in self.machine.pending):
            why = "another forward waits for its backward"
        if why:
            raise DeviceMemoryError(
                f"{program.capture.name}: device memory ran out in the backward ({ran_out}), and "
                f"the step cannot be repeated, because {why}; set a smaller budget: "
                "megacompile(model, gpu_memory=...)"
            )
        run.repeat()
        program.replan()
        program.plans.step_down(self.machine, ran_out, "the backward")
        self.variant = program.variant()
        with random_numbers_of(self.machine.device, self.random):
            self._compute()

    def _attempt(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.saved_values is None:
            raise self._refused(
                "backward() a second time, but the first one freed its saved tensors; call the "
                "first with retain_graph=True"
            )
        saved_values = dict(self.saved_values)
        if not compat.keeps_graph():
            self.saved_values, self.shared = None, []
            self.machine.pending.discard(self)
        executor = self._executor(tuple(tangents))
        device, pool = self.machine.device, self.machine.activations
        queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
        inputs = {n: tangents[k] for k, n in executor.tangents.items() if k in tangents}
        elsewhere = self.program.executor(self.variant).elsewhere | executor.elsewhere
        for name in executor.backward_inputs:
            if name in saved_values:
                inputs[name] = saved_values[name]
            elif name not in inputs:
                inputs[name] = converted(saved_values, name, elsewhere, pool, queue)
        del tangents, saved_values
        if not self.program.ran_backward:  # code may have been compiled since
            progress.now("running the first backward")
        return executor.backward(inputs)

    def _executor(self, tangents: tuple[int, ...]) -> Executor:
        """Return the schedule for these gradients; corrects wrong guesses of the forward."""
        program, wanted = self.program, self._wanted(tangents).schedule
        forward = program.executor(self.variant).schedule
        reuse = self.machine.slots.generation == self.generation and bool(forward.reused)
        variant = program.variant(tangents=tangents, reuse=reuse)
        if tangents != self.variant.tangents:
            program.tangents = tangents
            # `reuse` as for a right guess: another rank, which has seen an earlier call of this
            # graph, may have guessed right, and all ranks must fetch the same buckets
            variant = Variant(tangents, keep_last=False, reuse=reuse)
        run, update = self.machine.run, self._updates()
        if update:
            assert self.machine.in_backward is not None
            self.machine.in_backward.begin(self.machine.buckets, wanted.gradient_params)
        accumulate = (run.start_update if update else run.start)(wanted.gradient_params)
        ranks = self.machine.ranks
        replicas = ranks is not None and ranks.replicas > 1
        more = replicas and self.machine.more_backwards and not update
        defers = more and run.may_defer()  # a later backward sums over replicas
        if replicas:
            run.note_sums(defers=defers)
        variant = replace(variant, accumulate=accumulate, update=update, defers=defers)
        executor = program.executor(variant)
        if update and self.machine.staging is not None:
            self.machine.staging.reserve([self.machine.buckets[k] for k in wanted.gradient_params])
        if not program.holds(self.values):
            raise self._refused(
                "a backward for these outputs has no code for the sizes "
                f"{', '.join(map(str, self.values))}; call megacompile(model, dynamic=False), so "
                "that each set of sizes gets its own"
            )
        left = executor.schedule.reused == forward.reused  # another variant may use more slots
        if reuse and not (left and self.machine.slots.keeps(executor.schedule.slots)):
            return program.executor(replace(variant, reuse=False))
        return executor

    def _wanted(self, tangents: tuple[int, ...]) -> Executor:
        """Return the backward for these gradients: the forward's own if it guessed them."""
        if tangents == self.variant.tangents:
            return self.program.executor(self.variant)
        return self.program.executor(Variant(tangents, keep_last=False))

    def _updates(self) -> bool:
        """True if this backward updates its parameters. Raises BackwardError: a user wants a
        gradient that would never leave the device, or adds to it."""
        if self.machine.in_backward is None:
            return False
        if self.machine.more_backwards:  # then this one updates nothing
            self.program.plans.note(accumulates=True)
            return False
        run = self.machine.run
        asked = {at for at, use in run.unusual.items() if use.wish is not Wish.ACCUMULATE}
        if asked.issuperset(self.places):
            return False  # torch.autograd.grad()
        if run.unusual:
            key, index = min(run.unusual)
            name = self.machine.buckets[key].layout.params[index].name
            raise self._refused(
                f"the gradient of {name!r} is requested by a hook or by backward(inputs=...), or "
                "it comes in several parts in this backward: it is also used outside of the model, "
                "the model or a module in it was called twice, or a graph break lets two captured "
                "graphs use it; but gradients never leave the device if the backward updates; "
                "leave out optimizer= of megacompile(), or put this backward into `with "
                "megacompile.accumulate(model):`"
            )
        return True

    def _refused(self, why: str) -> BackwardError:
        return BackwardError(f"{self.program.capture.name}: {why}")

    def _check(self, tangents: tuple[int, ...]) -> None:
        """Raise if this backward would compute with values other than the forward's."""
        if compat.in_compiled_autograd():
            raise self._refused(
                "backward() in compiled autograd, which bypasses autograd's engine; turn off "
                "torch._dynamo.config.compiled_autograd: megacompile compiles the backward itself"
            )
        if torch.is_grad_enabled():
            raise self._refused(
                "backward() with create_graph=True: megacompile does not differentiate twice; "
                "compute this loss with the plain model"
            )
        if self.machine.gradients.buckets is not self.buckets:
            raise self._refused(
                "parameters were replaced between the forward and its backward; call backward() "
                "before you replace them"
            )
        if list(map(compat.version, self._roots)) != self.param_versions:
            self._check_parameters(tangents)
        for source in self.shared:
            changed = compat.version(source.tensor) != source.version
            if changed and not self._needed(tangents).isdisjoint(source.names):
                raise self._refused(
                    f"{source.what} of shape {tuple(source.tensor.shape)} was changed in place "
                    "since the forward, and the backward needs its old value; change a copy "
                    "(.clone()), or call backward() first"
                )

    def _check_parameters(self, tangents: tuple[int, ...]) -> None:
        """Raise if a parameter that this backward reads was changed since the forward."""
        read = None if self.machine.in_backward is not None else self._wanted(tangents)
        for proxy, version in zip(self.streamed, self.param_versions, strict=True):
            bucket, index = self.machine.place(proxy)
            unread = read is not None and (bucket.key, index) not in read.read_in_backward
            if compat.version(proxy.root) != version and not unread:
                raise self._refused(
                    f"parameter {bucket.params[index].name!r} was changed in place between the "
                    "forward and its backward; call backward() before optimizer.step()"
                )

    def _needed(self, tangents: tuple[int, ...]) -> set[str]:
        """The names of the values that this backward reads: a subset of all that may be saved."""
        executor = self._wanted(tangents)
        elsewhere = self.program.executor(self.variant).elsewhere | executor.elsewhere
        names = set(executor.backward_inputs)
        names.update(elsewhere[name] for name in names & elsewhere.keys())  # where it was left
        return names.union(executor.constants_in["backward"])
