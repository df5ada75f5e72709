"""The update of a bucket: by a kernel on a CUDA device, elsewhere by the twin, in torch.

A thread compiles the kernels. Until one is ready, the twin runs small updates on the device, too.

The first launch of a process takes two seconds: Triton builds its driver and compiles the kernel.
The twin is bitwise equal and needs no compiler, but takes about twenty launches per chunk of a
parameter. Triton is imported for the first kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias

import torch

from megacompile.runtime.device.background import Background, fulfil, is_over
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.rule import (
    PROGRAM_NUMEL,
    Launch,
    OptimizerRule,
    State,
    Update,
    launches,
)
from megacompile.runtime.optim.twin import CHUNK, apply

_MOST_CHUNKS = 1024  # for an update in torch: about 0.2 s on a slow host

Compile: TypeAlias = Callable[[OptimizerRule, Launch, torch.device], None]


def update_bucket(rule: OptimizerRule, updates: Sequence[Update]) -> None:
    """Update the parameters of one bucket in place: by a kernel on a CUDA device, once it is
    compiled, else by the twin. All tensors are on the gradients' device or in memory that it can
    address."""
    if not launched(rule, updates):
        for update in updates:
            apply(rule, update)


def launched(rule: OptimizerRule, updates: Sequence[Update]) -> bool:
    """Launch the kernel for these updates; returns False, with nothing changed, if the twin
    should run."""
    if not updates:
        return True
    device = updates[0].grad.device
    if device.type != "cuda":
        return False
    each = list(launches(rule, updates))
    if not KERNELS.ready(rule, each, device) and _all_on(device, updates):
        return False
    from megacompile.runtime.optim.kernels import run

    run(rule, each, device)
    return True


def _all_on(device: torch.device, updates: Sequence[Update]) -> bool:
    return all(tensor.device == device for each in updates for _, tensor in each.tensors())


class KernelCompiler:
    """Runs `compile` on a thread, once for each kernel. After it returns, a launch like the given
    one waits for nothing. Thread-safe."""

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._begun: dict[tuple[object, ...], Future[None]] = {}

    @functools.cached_property
    def _thread(self) -> Background:
        return Background("megacompile-kernels")

    def ready(self, rule: OptimizerRule, each: Sequence[Launch], device: torch.device) -> bool:
        """True if the update should be launched, False if it should run in torch. A large one waits
        for the thread, and its launch compiles what the thread has not begun. If
        compilation fails, the launch raises the error."""
        keys = [(rule, launch.signature, launch.columns, device) for launch in each]
        if sum(map(_chunks, each)) > _MOST_CHUNKS:
            wait([self._begun[key] for key in keys if key in self._begun])
            return True
        for key, launch in zip(keys, each, strict=True):
            if key not in self._begun:
                future: Future[None] = Future()
                work = functools.partial(self._compile, rule, launch, device)
                self._thread.submit(functools.partial(fulfil, future, work))
                self._begun[key] = future  # last: without a job, it would never be done
        return all(self._begun[key].done() for key in keys)


def _chunks(launch: Launch) -> int:
    """An upper bound of the chunks of a launch's parameters."""
    return launch.params + len(launch.blocks) * PROGRAM_NUMEL // CHUNK


def _compile(rule: OptimizerRule, like: Launch, device: torch.device) -> None:
    if is_over():  # the launch itself compiles, if there is one
        return
    from megacompile.runtime.optim.kernels import run

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        run(rule, launches(rule, [small_update(like, device)]), device)
        torch.cuda.current_stream().synchronize()


def small_update(like: Launch, device: torch.device) -> Update:
    """An update of a few elements with the kernel of a launch."""
    kind = like.signature
    numel = 16 if kind.aligned else 17

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def state(dtype: torch.dtype | None) -> State | None:
        if dtype == torch.uint8:
            return zeros(dtype), torch.zeros(absmax_numel(numel), device=device)
        return None if dtype is None else zeros(dtype)

    return Update(
        param=zeros(kind.param),
        grad=zeros(kind.grad),
        states=tuple(map(state, kind.states)),
        hyper=(1.0,) * like.columns[1],
        copy=None if kind.copy is None else zeros(kind.copy),
        seed=1 if kind.stochastic else None,
    )


KERNELS = KernelCompiler(_compile)
