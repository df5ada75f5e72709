"""Joins a program to the user's autograd: one `torch.autograd.Function` for each captured graph.

Its forward runs the forward schedule; its backward runs the backward schedule, which writes
parameter gradients to the host, and returns the gradients of the graph's other inputs. The host
parameters are inputs too, and get None, because their gradients are written already: all but those
that autograd needs itself, for a hook of the user or for `autograd.grad()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat, ops
from megacompile.errors import BackwardError, DeviceMemoryError
from megacompile.ir import Variant
from megacompile.runtime import shortage
from megacompile.runtime.activations import taken
from megacompile.runtime.captured import Program
from megacompile.runtime.executor import Executor
from megacompile.runtime.gradients import Place
from megacompile.runtime.machine import Machine
from megacompile.runtime.proxies import StreamedParameter


def run(program: Program, args: Sequence[Any]) -> list[Any]:
    """Call a program with a captured graph's inputs; gives the graph's outputs."""
    call = _Call(program, args)
    if any(program.differentiable(k) for k in program.tensor_outputs()):
        with torch.enable_grad():  # the graph itself may do so
            computed = _Function.apply(call, *args, *call.hosts)  # type: ignore[no-untyped-call]
    else:
        computed = call.forward(())
    by_position = dict(zip(program.tensor_outputs(), computed, strict=True))
    by_node = {program.outputs[k]: value for k, value in by_position.items()}
    inputs = call.inputs_by_name
    return [
        node
        if not isinstance(node, fx.Node)
        else inputs[node.name]
        if node.op == "placeholder"
        else by_node[node]
        for node in program.outputs
    ]


_Found = tuple[dict[str, torch.Tensor], dict[Place, torch.Tensor]]  # of inputs, of parameters


class _Call:
    """One forward of a program, and what its backward needs."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.program = program
        self.machine: Machine = program.machine
        self.variant = program.variant()
        names = [n.name for n in program.stages.forward.find_nodes(op="placeholder")]
        self.inputs_by_name = {name: args[int(name.removeprefix("x"))] for name in names}
        self.params = [arg for arg in args if isinstance(arg, StreamedParameter)]
        places = [self.machine.place(proxy) for proxy in self.params if proxy.requires_grad]
        self.places = tuple(dict.fromkeys((bucket.key, i) for bucket, i in places))
        self.residuals: dict[str, Any] | None = None
        self.exceptions: set[Place] = set()  # whose gradients do not go to p.grad

    def forward(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Run the forward schedule; gives the computed outputs, each once."""
        self.random = shortage.random_state(self.machine.device)
        outputs = self._compute()
        residuals = self.residuals or {}
        if args:  # autograd holds this call
            self.machine.pending.add(self)
        self.buckets = self.machine.gradients.buckets
        self.param_versions = [(proxy, proxy.root._version) for proxy in self.params]
        self.input_versions = {
            name: (self.inputs_by_name[name], self.inputs_by_name[name]._version)
            for name in residuals
            if name in self.inputs_by_name
        }
        return [outputs[k] for k in self.program.tensor_outputs()]

    def _compute(self) -> list[Any]:
        executor = self.program.executor(self.variant)
        outputs, self.residuals = executor.forward(
            {name: value.detach() for name, value in self.inputs_by_name.items()}
        )
        self.generation = self.machine.slots.generation
        return outputs

    @property
    def hosts(self) -> list[nn.Parameter]:
        """The host parameters that may get a gradient."""
        return [self.machine.buckets[key].params[i] for key, i in self.places]

    def backward(self, given: Sequence[torch.Tensor | None]) -> _Found:
        """Run the backward schedule on the outputs' gradients; gives those of the inputs."""
        positions = self.program.tensor_outputs()
        tangents = {
            k: gradient
            for k, gradient in zip(positions, given, strict=True)
            if gradient is not None and self.program.differentiable(k)
        }
        if not tangents:
            return {}, {}
        self._check()
        returned, dropped = self._exceptions()
        self.exceptions = {*returned, *dropped}
        with self.machine.gradients.aside(returned, dropped) as of_params:
            return self._run(tangents), of_params

    def _exceptions(self) -> tuple[list[Place], list[Place]]:
        """The parameters whose gradients autograd needs itself, and those that nobody wants."""
        returned, dropped = [], []
        for place, host in zip(self.places, self.hosts, strict=True):
            accumulates = compat.accumulates_into(host)
            if accumulates is False:
                dropped.append(place)
            elif (
                accumulates is None
                or compat.gradient_hooks(host)
                or compat.post_accumulate_hooks(host)
            ):
                returned.append(place)
        return returned, dropped

    def _run(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        while True:
            try:
                return self._attempt(dict(tangents))
            except torch.OutOfMemoryError as error:
                ran_out = shortage.first_line(error)  # not the error: its frames hold memory
            self._start_again(ran_out)

    def _start_again(self, ran_out: str) -> None:
        """After a backward that ran out of device memory: the forward again, by a plan that needs
        less. Gradients that are on the host already stay as they are."""
        program, gradients = self.program, self.machine.gradients
        self.residuals = None
        why = ""
        if ops.nodes_of(program.stages.forward, ops.assign):
            why = "it changes buffers"
        elif self._updates():
            why = "it updates parameters"
        elif any(call is not self for call in self.machine.pending):
            why = "another forward waits for its backward"
        if why:
            raise DeviceMemoryError(
                f"{program.capture.name}: device memory ran out in the backward ({ran_out}), and "
                f"the step cannot be repeated, because {why}; let the plan use less from the "
                "start: megacompile(model, gpu_memory=...)"
            )
        gradients.repeat()
        program.replan()
        shortage.step_down(program.compiler, self.machine.slots, ran_out, "the backward")
        now = shortage.random_state(self.machine.device)
        shortage.set_random_state(self.machine.device, self.random)
        self.variant = program.variant()
        self._compute()
        shortage.set_random_state(self.machine.device, now)

    def _attempt(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        residuals = self._take_residuals()
        executor = self._executor(tuple(tangents))
        device = self.machine.device
        queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
        inputs = {f"t{k}": gradient for k, gradient in tangents.items()}
        for name in executor.inputs("backward"):
            if name not in inputs:
                inputs[name] = taken(residuals, name, self.machine.activations, queue)
        del tangents, residuals
        return executor.backward(inputs)

    def _executor(self, tangents: tuple[int, ...]) -> Executor:
        """The schedule for these gradients; wrong guesses of the forward are corrected here."""
        program = self.program
        forward = program.executor(self.variant).schedule
        hold = self.machine.slots.generation == self.generation and bool(forward.held)
        variant = program.variant(tangents=tangents, hold=hold)
        wanted = forward
        if tangents != self.variant.tangents:
            program.tangents = tangents
            variant = Variant(tangents, keep_last=False)
            wanted = program.executor(variant).schedule
        update = self._updates()
        start = self.machine.gradients.start_update if update else self.machine.gradients.start
        if update:
            assert self.machine.in_backward is not None
            self.machine.in_backward.begin(self.machine.buckets, wanted.gradient_params)
        accumulate = start(wanted.gradient_params)
        variant = replace(variant, accumulate=accumulate, update=update)
        executor = program.executor(variant)
        if hold and not self.machine.slots.keeps(executor.schedule.slots):
            return program.executor(replace(variant, hold=False))
        return executor

    def _updates(self) -> bool:
        """Does this backward update its parameters?"""
        updates = self.machine.in_backward
        if updates is None or updates.accumulating:
            return False
        if not self.exceptions:
            return True
        if self.exceptions >= set(self.places):
            return False  # torch.autograd.grad()
        bucket, i = self.machine.buckets, min(self.exceptions)
        raise BackwardError(
            f"{self.program.capture.name}: the gradient of "
            f"{bucket[i[0]].layout.params[i[1]].name!r} is wanted by a hook, or by "
            "backward(inputs=...), but gradients never leave the device where the backward "
            "updates; leave out optimizer= of megacompile(), or put this backward into "
            "`with megacompile.accumulate(model):`"
        )

    def _take_residuals(self) -> dict[str, Any]:
        if self.residuals is None:
            raise BackwardError(
                f"{self.program.capture.name}: backward() a second time, but what it needs was "
                "freed by the first; call the first with retain_graph=True"
            )
        taken = dict(self.residuals)
        if not compat.keeps_graph():
            self.residuals = None
            self.machine.pending.discard(self)
        return taken

    def _check(self) -> None:
        name = self.program.capture.name
        if torch.is_grad_enabled():
            raise BackwardError(
                f"{name}: backward() with create_graph=True: megacompile does not differentiate "
                "twice; compute this loss with the plain model"
            )
        if self.machine.gradients.buckets is not self.buckets:
            raise BackwardError(
                f"{name}: parameters were replaced between the forward and its backward, and "
                "taken over by another call; call backward() before that"
            )
        for proxy, version in self.param_versions:
            if proxy.root._version != version:
                bucket, index = self.machine.place(proxy)
                raise BackwardError(
                    f"{name}: parameter {bucket.params[index].name!r} was changed in place between "
                    "the forward and its backward; call backward() before optimizer.step()"
                )
        for key, (tensor, version) in self.input_versions.items():
            if tensor._version != version:
                raise BackwardError(
                    f"{name}: input {key} of shape {tuple(tensor.shape)} was changed in place "
                    "between the forward and its backward; pass a copy (.clone())"
                )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> Any:
        outputs = call.forward(args)
        ctx.call = call
        ctx.args = len(args) - len(call.places)
        ctx.names = {int(name.removeprefix("x")): name for name in call.inputs_by_name}
        ctx.set_materialize_grads(False)
        positions, differentiable = call.program.tensor_outputs(), call.program.differentiable
        ctx.mark_non_differentiable(
            *(t for k, t in zip(positions, outputs, strict=True) if not differentiable(k))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_inputs, of_params = ctx.call.backward(gradients)
        return (
            None,
            *(of_inputs.get(ctx.names.get(i, "")) for i in range(ctx.args)),
            *(of_params.get(place) for place in ctx.call.places),
        )
