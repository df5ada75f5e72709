"""Looks inside a megacompiled model: what tests may know of it that a user may not."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from torch import nn

from megacompile.runtime.model.program import Program
from megacompile.runtime.model.streamed import StreamedModel
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates.update import UpdatePath


def streamed(model: nn.Module) -> StreamedModel:
    """What runs when the model is called."""
    found: Any = model._compiled_call_impl
    assert isinstance(found, StreamedModel)
    return found


def is_streamed(model: nn.Module) -> bool:
    """Is the model megacompiled?"""
    return model._compiled_call_impl is not None


def machine(model: nn.Module) -> Machine:
    """The streams, slots and buckets of a model."""
    return streamed(model).machine


def buckets(model: nn.Module) -> dict[str, HostBucket]:
    """The buckets of a model, by name."""
    bound = machine(model).buckets.values()
    by_name = {bucket.layout.name: bucket for bucket in bound}
    assert len(by_name) == len(bound), "two buckets of one name"
    return by_name


def programs(model: nn.Module) -> list[Program]:
    """What was captured of a model, one for each graph and each kind of inputs."""
    found = [program for graph in streamed(model).graphs for program in graph.programs.values()]
    return [program for program in found if program is not None]


def executors(model: nn.Module) -> list[Executor]:
    """Every executor that a model has made."""
    return [executor for program in programs(model) for executor in program.executors.values()]


def residents(model: nn.Module) -> set[str]:
    """The buckets that live on the device."""
    return {name for name, bucket in buckets(model).items() if bucket.resident is not None}


def ways(model: nn.Module) -> set[UpdatePath]:
    """How the host updates the buckets of a model."""
    return set(streamed(model).updates.ways.values())


def wait_for_code(model: nn.Module) -> None:
    """Until processes beside this one have compiled what they were asked to, or cannot."""
    compiler: Any = streamed(model).buckets.plans.compiler
    for jobs, _ in compiler.pipeline.to_come._batches:
        if jobs is not None:
            done = concurrent.futures.wait(list(jobs.futures.values()), timeout=100)
            assert not done.not_done


def step_down(model: nn.Module) -> str:
    """What a model does when device memory runs out: the first thing that it can do without."""
    return streamed(model).buckets.plans.compiler.step_down()


def update_by(model: nn.Module, workers: Any) -> None:
    """Let somebody else make the host's updates: `workers` is asked as `Workers` are."""
    machine(model).host_updates.workers = workers
