"""One call of a program: its forward, the tensors saved for its backward, and the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat, progress
from megacompile.errors import BackwardError, DeviceMemoryError
from megacompile.ir.buckets import ParamId
from megacompile.ir.capture import Variant
from megacompile.ir.symbols import has_numbers
from megacompile.progress import line
from megacompile.runtime.device.saved import converted
from megacompile.runtime.model import shortage
from megacompile.runtime.model.autograd_nodes import (
    Gate,
    Graph,
    Watched,
    hooked_inside,
    nodes_behind,
    say_hooked,
    users,
    watched,
)
from megacompile.runtime.model.program import Program
from megacompile.runtime.model.shared_values import Readings, Source, changed, shared
from megacompile.runtime.ops.compute import random_state, set_random_state
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.gradient_record import Others
from megacompile.runtime.params.gradient_run import GradientRun
from megacompile.runtime.params.proxies import StreamedParameter


def run(program: Program, args: Sequence[Any]) -> list[Any]:
    """Call a program with a captured graph's inputs; returns the graph's outputs.

    In-place changes of the graph are visible afterwards, to autograd too.
    """
    call = Call(program, args)
    if program.differentiable:
        with torch.enable_grad():  # the graph itself may
            trained = [k for k in program.other_tensors(args) if args[k].requires_grad]
            computed = compat.apply(
                Graph, call, call.gates(), trained, *map(args.__getitem__, trained)
            )
    else:
        computed = call.forward()
    by_position = dict(zip(program.computed, computed, strict=True))
    call.outputs = watched({k: t for k, t in by_position.items() if t.requires_grad})
    by_node = {program.outputs[k]: value for k, value in by_position.items()}
    inputs = call.inputs_by_name

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return program.number(node, args) if has_numbers(node) else node
        return inputs[node.name] if node.op == "placeholder" else by_node[node]

    for position, k in program.recorded:
        _record(args[position], by_node[program.outputs[k]])
    count = len(program.outputs) - len(program.recorded)
    outputs = [value(node) for node in program.outputs[:count]]
    for k, view in program.stages.input_views:
        shape, stride, offset = program.number((view.shape, view.stride, view.offset), args)
        outputs[k] = _view(outputs[k], shape, stride, offset, requires_grad=view.requires_grad)
    program.hand(outputs)
    return outputs


def _view(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    *,
    requires_grad: bool,
) -> torch.Tensor:
    """A view of an input that starts `offset` elements after the input's first."""
    base = tensor if requires_grad or not tensor.requires_grad else tensor.detach()
    with torch.enable_grad():  # autograd refuses to change a `no_grad` view in place
        return base.as_strided(shape, stride, base.storage_offset() + offset)


def _record(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Tells autograd that a tensor was changed in place; the tensor already holds its new value.

    Gradients of later uses then go through the graph that changed it. A leaf that requires grad
    gets no history: it can only have been changed outside of autograd (`detach()`).
    """
    if new.requires_grad and not (tensor.is_leaf and tensor.requires_grad):
        with torch.enable_grad():
            tensor.copy_(new)


class Call:
    """One forward of a program, with the tensors saved for its backward."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.program = program
        self.machine: Machine = program.machine
        self.variant = program.variant()
        self.inputs_by_name = {name: args[k] for name, k in program.inputs.items()}
        self.places = program.places
        self.streamed: list[StreamedParameter] = [args[k] for k in program.streamed]
        self.values = program.values(args)
        self.saved_values: dict[str, Any] | None = None
        self.shared: list[Source] = []  # the tensors whose storage they alias
        self.observed = compat.ddp_around() is not None
        self.outputs: Watched = {}  # which the user may hook
        self._handed: dict[int, dict[ParamId, torch.Tensor]] = {}  # from the backward to the gates

    def gates(self) -> torch.Tensor | None:
        """The node's link to the gates of this call; None if nothing is trained."""
        gradients = self.machine.gradients
        if not self.places:
            return None
        token = self._gates()
        while gradients.follow(self.places, nodes_behind(token)):
            token = self._gates()  # new nodes may have other hooks
        return token

    def _gates(self) -> torch.Tensor:
        """Create the gates; each parameter has its own gate if a hook waits for a gradient."""
        gradients = self.machine.gradients
        groups = [self.places]
        if gradients.ends(self.places).hooked:
            groups = [(place,) for place in self.places]
        token = torch.empty(0, device=self.machine.device)  # on this device, for autograd's stream
        for group in groups:
            token = compat.apply(Gate, self, group, token, *gradients.ends(group).params)
        return token

    @compat.opaque
    def gradients_for(self, places: Sequence[ParamId]) -> list[torch.Tensor | None]:
        """The gradients that a gate returns; the call no longer references them."""
        number = compat.backward_id()
        handed = self._handed.get(number, {})
        found = [handed.pop(place, None) for place in places]
        if not handed:
            self._handed.pop(number, None)
        return found

    def forward(self, *, recorded: bool = False) -> list[torch.Tensor]:
        """Run the forward schedule; returns the computed outputs, each once.

        Args:
            recorded: autograd holds this call, and a backward may follow.
        """
        with self.machine.running:
            self.machine.gradients.forget()
            self.random = random_state(self.machine.device)
            outputs = self._compute()
        computed = [outputs[k] for k in self.program.computed]
        if not recorded:
            return computed
        self.machine.pending.add(self)
        self.buckets = self.machine.gradients.buckets
        self._roots = [proxy.root for proxy in self.streamed]
        self.param_versions = compat.versions(self._roots)
        return computed

    def _compute(self) -> list[Any]:
        executor = self.program.executor(self.variant)
        if executor.is_left():
            executor = self.program.executor(replace(self.variant, reuse=True))
        saves = executor.schedule.backward is not None
        names, inputs = self.program.changed_names, self.inputs_by_name
        before = Readings.of(inputs, executor.constants, names) if saves else None
        outputs, self.saved_values = executor.forward(
            {
                name: value.detach() if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
        )
        if before is not None:
            self.shared = shared(
                self.saved_values,
                before,
                inputs,
                outputs,
                borrowed=executor.borrowed,
                written=executor.schedule.written,
            )
        self.generation = self.machine.slots.generation
        return outputs

    @compat.opaque
    def backward(
        self, node: object, given: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Run the backward schedule on the outputs' gradients; returns the gradients of the other
        inputs, by position. The gates return the gradients of parameters.
        """
        tangents = {
            k: gradient
            for k, gradient in zip(self.program.computed, given, strict=True)
            if gradient is not None and k in self.program.differentiable
        }
        if not tangents:
            return {}
        hooked = hooked_inside(self.outputs, self.program.capture, tangents)
        if hooked is not None and not self.program.said_hooked:
            self.program.said_hooked = True
            say_hooked(self.program.capture.name, hooked)
        with self.machine.running:
            self._check(tuple(tangents))
            self.machine.run = run = self._prepare(node)
            try:
                with self._line():
                    of_inputs = self._attempts(tangents)
                of_params = run.for_autograd()
            finally:
                self.machine.run = None
        if self.saved_values is None:
            self.inputs_by_name = {}  # a reference to the loss keeps this call alive
        self.program.ran_backward = True
        self._handed[compat.backward_id()] = of_params
        return {self.program.inputs[name]: gradient for name, gradient in of_inputs.items()}

    def _line(self) -> AbstractContextManager[None]:
        """Shows progress during the first backward."""
        if self.program.ran_backward or self.machine.steps:
            return nullcontext()
        return line("running the first backward", self.machine.progress)

    def _prepare(self, node: object) -> GradientRun:
        """Find the consumers of the parameters' gradients in this backward, and other producers."""
        found = map(users, compat.backward_calls())
        return GradientRun(
            self.machine.gradients,
            self.places,
            [each for each in found if node in each.nodes],
            observed=self.observed,
        )

    def _attempts(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        while True:
            try:
                return self._attempt(dict(tangents))
            except torch.OutOfMemoryError as error:
                ran_out = shortage.first_line(error)  # drop the error: its frames hold memory
            self._start_again(ran_out)

    def _start_again(self, ran_out: str) -> None:
        """After a backward that ran out of device memory, repeat the forward with a plan that needs
        less. Gradients that are already on the host stay as they are."""
        program, run = self.program, self.machine.current_run()
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
        shortage.step_down(program.plans.compiler, self.machine, ran_out, "the backward")
        now = random_state(self.machine.device)
        set_random_state(self.machine.device, self.random)
        self.variant = program.variant()
        self._compute()
        set_random_state(self.machine.device, now)

    def _attempt(self, tangents: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        saved_values = self._take_saved_values()
        executor = self._executor(tuple(tangents))
        device = self.machine.device
        queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
        named = executor.tangents
        inputs = {named[k]: gradient for k, gradient in tangents.items() if k in named}
        elsewhere = self.program.executor(self.variant).elsewhere | executor.elsewhere
        for name in executor.backward_inputs:
            if name in inputs:
                continue
            if name in saved_values:
                inputs[name] = saved_values[name]
            else:
                pool = self.machine.activations
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
        run, update = self.machine.current_run(), self._updates()
        if update:
            assert self.machine.in_backward is not None
            self.machine.in_backward.begin(self.machine.buckets, wanted.gradient_params)
        start = run.start_update if update else run.start
        accumulate = start(wanted.gradient_params)
        defers = not update and self._defers(run)
        run.note_sums(defers=defers)
        variant = replace(variant, accumulate=accumulate, update=update, defers=defers)
        executor = program.executor(variant)
        if update:
            self.machine.reserve_staging(wanted.gradient_params)
        if not program.holds(self.values):
            raise BackwardError(
                f"{program.capture.name}: a backward for these outputs has no code for the sizes "
                f"{', '.join(map(str, self.values))}; call megacompile(model, dynamic=False), so "
                "that each set of sizes gets its own"
            )
        left = executor.schedule.reused == forward.reused  # another variant may use more slots
        if reuse and not (left and self.machine.slots.keeps(executor.schedule.slots)):
            return program.executor(replace(variant, reuse=False))
        return executor

    def _wanted(self, tangents: tuple[int, ...]) -> Executor:
        """Return the backward for these gradients: the forward's own if it guessed them."""
        expected = tangents == self.variant.tangents
        variant = self.variant if expected else Variant(tangents, keep_last=False)
        return self.program.executor(variant)

    def _defers(self, run: GradientRun) -> bool:
        """True if a later backward sums the gradients over replicas."""
        ranks = self.machine.ranks
        more = ranks is not None and ranks.replicas > 1 and self.machine.micro_steps.more
        run.backward.last = not more
        return more and run.may_defer()

    def _updates(self) -> bool:
        """True if this backward updates its parameters.

        Raises:
            BackwardError: a user wants a gradient that would never leave the device, or adds to
                it.
        """
        if self.machine.in_backward is None:
            return False
        if self.machine.micro_steps.more:  # then this one updates nothing
            self.program.plans.say_accumulates()
            return False
        run = self.machine.current_run()
        asked = run.asked()
        if asked.issuperset(self.places):
            return False  # torch.autograd.grad()
        instead = (
            "but gradients never leave the device if the backward updates; leave out optimizer= "
            "of megacompile(), or put this backward into `with megacompile.accumulate(model):`"
        )
        name = self.program.capture.name
        if asked:
            raise BackwardError(
                f"{name}: the gradient of {self._name(min(asked))!r} is requested by a hook, or by "
                f"backward(inputs=...), {instead}"
            )
        if by_code := run.used_by(Others.CODE):
            raise BackwardError(
                f"{name}: {self._name(min(by_code))!r} is also used outside of the model in this "
                f"backward, so part of its gradient comes from there, {instead}"
            )
        if by_graphs := run.used_by(Others.GRAPHS):
            raise BackwardError(
                f"{name}: {self._name(min(by_graphs))!r} gets its gradient in several parts in "
                "this backward: the model, or a module in it, was called twice, or a graph break "
                f"lets two captured graphs use it, {instead}"
            )
        return True

    def _name(self, place: ParamId) -> str:
        return self.machine.buckets[place[0]].layout.params[place[1]].name

    def _take_saved_values(self) -> dict[str, Any]:
        if self.saved_values is None:
            raise BackwardError(
                f"{self.program.capture.name}: backward() a second time, but the first one freed "
                "its saved tensors; call the first with retain_graph=True"
            )
        taken = dict(self.saved_values)
        if not compat.keeps_graph():
            self.saved_values, self.shared = None, []
            self.machine.pending.discard(self)
        return taken

    def _check(self, tangents: tuple[int, ...]) -> None:
        """Raise if this backward would compute with values other than the forward's."""
        name = self.program.capture.name
        if compat.in_compiled_autograd():
            raise BackwardError(
                f"{name}: backward() in compiled autograd, which bypasses autograd's engine; turn "
                "off torch._dynamo.config.compiled_autograd: megacompile compiles the backward "
                "itself"
            )
        if torch.is_grad_enabled():
            raise BackwardError(
                f"{name}: backward() with create_graph=True: megacompile does not differentiate "
                "twice; compute this loss with the plain model"
            )
        if self.machine.gradients.buckets is not self.buckets:
            raise BackwardError(
                f"{name}: parameters were replaced between the forward and its backward; call "
                "backward() before you replace them"
            )
        if compat.versions(self._roots) != self.param_versions:
            self._check_parameters(tangents)
        source = changed(self.shared, lambda: self._needed(tangents))
        if source is not None:
            raise BackwardError(
                f"{name}: {source.what} of shape {tuple(source.tensor.shape)} was changed in place "
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
                raise BackwardError(
                    f"{self.program.capture.name}: parameter {bucket.params[index].name!r} was "
                    "changed in place between the forward and its backward; call backward() before "
                    "optimizer.step()"
                )

    def _needed(self, tangents: tuple[int, ...]) -> Iterator[str]:
        """The names of the values that this backward reads: a subset of all that may be saved."""
        executor = self._wanted(tangents)
        elsewhere = self.program.executor(self.variant).elsewhere | executor.elsewhere
        for name in executor.backward_inputs:
            yield elsewhere.get(name, name)  # the forward left it there
            yield name
        yield from executor.constants_in["backward"]
