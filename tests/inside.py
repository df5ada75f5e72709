"""Looks inside a megacompiled model: what tests may know of it that a user may not."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megacompile import compat, notices
from megacompile.beside import compile_pool
from megacompile.cost.memory import device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import Places
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.runtime.checkpoint.files import Reader
from megacompile.runtime.device.background import at_fork
from megacompile.runtime.device.buffers import HostBuffer, Wanted
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.model.program import Program
from megacompile.runtime.model.streamed import StreamedModel
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.staging import BucketBuffers
from megacompile.verify import proof
from tests.interrupts import profiled


def has_cpp_compiler() -> bool:
    """True if Inductor can compile for the CPU here."""
    return compat.has_cpp_compiler()


def start_processes() -> None:
    """Let processes compile for this one, as on a GPU."""
    compile_pool.start(torch.device("cpu"))


def stop_processes() -> None:
    """End the processes that compile for this one."""
    compile_pool.stop()


@contextmanager
def before_reads(fault: Callable[[], None]) -> Iterator[None]:
    """A context in which `fault` is called before each piece of a checkpoint is read."""
    read = Reader._fill

    def faulty(*args: Any) -> None:
        fault()
        read(*args)

    with mock.patch.object(Reader, "_fill", faulty):
        yield


def say_again() -> None:
    """Warn again of what this process was warned of once."""
    notices._said.clear()


def streamed(model: nn.Module) -> StreamedModel:
    """What runs when the model is called."""
    found: Any = model._compiled_call_impl
    assert isinstance(found, StreamedModel)
    return found


def is_streamed(model: nn.Module) -> bool:
    return model._compiled_call_impl is not None


def has_proxies(model: nn.Module) -> bool:
    """Are proxies in the places of parameters, as in a call?"""
    proxies = {id(site.proxy) for site in streamed(model).buckets.proxies.sites}
    return any(id(param) in proxies for param in model.parameters())


def machine(model: nn.Module) -> Machine:
    """The streams, slots and buckets of a model."""
    return streamed(model).machine


@contextmanager
def begun_in_a_fork(model: nn.Module, begin: Callable[[], None]) -> Iterator[None]:
    """A context for one fork. `begin` runs once the fork has waited for all work in flight, as code
    of other threads may, and updates on the host that it starts go on when the context ends."""
    ended = threading.Event()

    def hold() -> None:
        ended.wait()

    class Other:
        def before_fork(self) -> None:
            machine(model).host_updates._host.submit(hold)
            begin()

    other = Other()
    at_fork(other, last=True)
    try:
        yield
    finally:
        ended.set()
        del other


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A storage of a tensor's memory, which does not hold it."""
    return compat.own_storage(tensor)


def prove(schedule: Schedule) -> None:
    proof.verify(schedule)


def planned_bytes(schedule: Schedule, *, fused: bool) -> int:
    """The predicted peak of device memory, where an optimizer has no states."""
    cost = OptimizerCost(states=0)
    return device_memory(schedule, optimizer=cost, fused=fused).peak.total_bytes


def buckets(model: nn.Module) -> dict[str, HostBucket]:
    bound = machine(model).buckets.values()
    by_name = {bucket.layout.name: bucket for bucket in bound}
    assert len(by_name) == len(bound), "two buckets of one name"
    return by_name


def programs(model: nn.Module) -> list[Program]:
    """What was captured of a model, one for each graph and each kind of inputs."""
    found = [program for graph in graphs(model) for program in graph.programs.values()]
    return [program for program in found if program is not None]


@contextmanager
def graph_calls(ran: list[Program | None]) -> Iterator[None]:
    """Note what each call of a captured graph in the block runs; None: it is in eager mode."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_qualname == "CapturedGraph.__call__":
            graph = frame.f_locals["self"]
            ran.append(graph.programs.get(next(reversed(graph._called), None)))

    with profiled(note):
        yield


@contextmanager
def fetches(found: list[nn.Parameter]) -> Iterator[None]:
    """Note the parameters that eager code copies to the device in the block, each time."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_qualname == "StreamedParameter.fetched":
            param = frame.f_locals["self"].param
            found.extend([param] if param is not None else [])  # None: it is being captured

    with profiled(note):
        yield


def executors(model: nn.Module) -> list[Executor]:
    """Every executor that a model has made."""
    return [executor for program in programs(model) for executor in program.executors.values()]


def residents(model: nn.Module) -> set[str]:
    return {name for name, bucket in buckets(model).items() if bucket.resident is not None}


def graphs(model: nn.Module) -> list[Any]:
    """The captured graphs of a model, in the order of capture."""
    return streamed(model).captures.graphs


def backends(model: nn.Module) -> set[str]:
    """How the host updates the buckets of a model."""
    return set(streamed(model).updates.parts.backends.values())


def wait_for_code(model: nn.Module) -> None:
    """Until processes beside this one have compiled what they were asked to, or cannot."""
    compiler: Any = streamed(model).buckets.plans.compiler
    for jobs, _ in compiler.pipeline.to_come._batches:
        if jobs is not None:
            done = concurrent.futures.wait(list(jobs.futures.values()), timeout=100)
            assert not done.not_done


def wait_for_updates(model: nn.Module) -> None:
    """Until the thread that makes the host's updates refers to none of them."""
    machine(model).host_updates._host.call(lambda: None)


def step_down(model: nn.Module) -> str:
    """What a model does when device memory runs out: the first thing that it can do without."""
    return streamed(model).buckets.plans.compiler.step_down()


def update_by(model: nn.Module, workers: Any) -> None:
    """Let somebody else make the host's updates: `workers` gets the jobs of `Workers`."""
    ours: Any = machine(model).host_updates
    ours.submit, ours.help = workers.submit, workers.help


def want(model: nn.Module, *names: str, on_disk: Collection[str] = ()) -> None:
    """Let these buckets live on the device, and the states of others on the disk, from the next
    call. Parameters on the disk stay there."""
    buckets = machine(model).buckets.items()
    keys = {bucket.layout.name: key for key, bucket in buckets}
    stored = [key for key, bucket in buckets if bucket.on_disk is not None]
    places = Places.of((keys[name] for name in names), (keys[name] for name in on_disk), stored)
    compiler: Any = streamed(model).buckets.plans.compiler
    compiler.chooser.wanted.set(places)


def choose(model: nn.Module, **choice: Any) -> None:
    """Let the plans of a model that trains be made from these choices (`ir/plan.py`)."""
    compiler: Any = streamed(model).buckets.plans.compiler
    compiler.chooser = _Chosen(compiler.chooser, choice)


class _Chosen:
    """A chooser that has made up its mind."""

    def __init__(self, chooser: Any, choice: dict[str, Any]) -> None:
        self.chooser, self.choice = chooser, choice

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chooser, name)

    def choose(self, stages: Any, schedule: Any, *others: Any, **named: Any) -> Any:
        found = self.chooser.choose(stages, schedule, *others, **named)
        if schedule.backward is None:
            return found
        choice, reasons = found
        return replace(choice, **self.choice), reasons


def _disk_leases(model: nn.Module) -> list[BucketBuffers]:
    """The pools of buffers for data on a disk, after the work in flight."""
    of = machine(model)
    for bucket in of.buckets.values():
        bucket.pending.wait()
    staging = of.staging
    return [staging.states, staging.prefetches, staging.updates] if staging else []


def drop_disk_buffers(model: nn.Module) -> None:
    """Let whoever reads from a disk next need new buffers."""
    for leases in _disk_leases(model):
        leases._free = deque(None for _ in leases._free)


def lent_buffers(model: nn.Module) -> int:
    """The buffers for data on a disk that are not returned once all work has ended."""
    lent = 0
    for leases in _disk_leases(model):
        leases._thread.call(lambda: None)  # what it has still to take back
        lent += leases.count - len(leases._free)
    return lent


@contextmanager
def before_each_op(model: nn.Module, function: Callable[[Stream], None] | None) -> Iterator[None]:
    """For its duration a function is called on the stream of each op, ahead of it."""
    streams: Any = machine(model).streams
    issue, outer = streams.issue, vars(streams).get("issue")

    def late(stream: Stream, waits: Iterable[Handle], work: Callable[[], Any]) -> Handle:
        def run() -> Any:
            if function is not None:
                function(stream)
            return work()

        return issue(stream, waits if function is not None else (), run)

    streams.issue = late
    try:
        yield
    finally:
        del streams.issue
        if outer is not None:
            streams.issue = outer


def left_for_backward(output: Tensor) -> int:
    """Device bytes that a forward left for its backward, but for the user's inputs."""
    call: Any = output.grad_fn
    saved, inputs = call.call.saved_values, call.call.inputs_by_name
    return sum(v.nbytes for k, v in saved.items() if isinstance(v, Tensor) and k not in inputs)


def pinned_bucket(param: nn.Parameter) -> HostBucket:
    """A parameter in page-locked memory."""
    return HostBucket(Bucket.layout(0, "unit", [("p", param)]), [param], pin=True)


def wanted(size_bytes: int) -> Wanted:
    """Host memory that will be asked for."""
    return Wanted(size_bytes, pin=False)


def abstract(
    model: nn.Module, args: Iterable[Any], named: dict[str, Any] | None = None, **options: Any
) -> list[AbstractProgram]:
    """What is captured of a call where there are shapes alone; by these options, on the CPU."""
    resolved = abstract_options(**{"device": "cpu", "lowering": "eager", **options})
    return abstract_programs(model, tuple(args), named, options=resolved)


class SimulatedRanks(Ranks):
    """The ranks of a model, for whoever carries out their collectives in another way."""


def page_locked(size_bytes: int) -> HostBuffer:
    """Host memory from which a device copies."""
    return HostBuffer(size_bytes, pin=True)
