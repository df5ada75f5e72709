"""Figures of training while it runs: `megacompile.metrics(model)`.

A meter counts the calls and optimizer steps of one model and keeps the last steps. Every 50 steps
it traces a few, to see what they wait for. Nothing here waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile.text import duration, format_bytes
from megacompile.views.critical_path import NONE, traced_steps
from megacompile.views.recorder import Trace

_LAST = 20  # the figures are means of this many steps
_EVERY = 50  # steps from one traced step to the next
_FIRST = 2  # steps before the first traced one
_TRACED = 3  # steps in a trace; the time of a step needs two
_CALLS = 200  # without a step until a trace ends: an evaluation, or the end of training
_SHOWN = 0.02  # of a step: the least share in the text


class MemoryUse(NamedTuple):
    """Bytes of one memory."""

    now_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """See `megacompile.metrics`. A figure that is not known yet, or does not apply, is None."""

    steps: int  # the times and rates are means of this many; at most 20
    step_s: float | None  # seconds from one `optimizer.step()` to the next
    predicted_s: float | None  # the plan's, for steps of one call
    tokens_s: float | None  # of the largest (batch, length) integers among the inputs, with padding
    samples_s: float | None  # of the first dimension of the first input
    tflop_s: float | None  # (4 * parameters + 2 * trained ones) a token / 1e12; no recomputation
    mfu: float | None  # model FLOPs utilization: of the measured rate of bf16 products
    waits: dict[str, float]  # share of each stream in the critical path of the last traced steps
    memory: dict[str, MemoryUse]  # "device" on CUDA, "host", and "disk" if there is one

    def to_dict(self) -> dict[str, float]:
        """The known figures under flat names for a logger, such as "tokens_s", "waits/host" and
        "memory/device_peak_bytes"."""
        found = {name: value for name, value in asdict(self).items() if name not in _NESTED}
        found |= {f"waits/{stream}": share for stream, share in self.waits.items()}
        for tier, used in self.memory.items():
            found[f"memory/{tier}_bytes"] = used.now_bytes
            found[f"memory/{tier}_peak_bytes"] = used.peak_bytes
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        if self.step_s is None:
            return "no step measured yet: metrics() measures from its first call on"
        predicted = self.predicted_s
        step = f"{duration(self.step_s)} a step"
        parts = [step if predicted is None else f"{step} ({duration(predicted)} predicted)"]
        if self.tokens_s:
            parts.append(f"{self.tokens_s:,.0f} tokens/s")
        elif self.samples_s:
            parts.append(f"{self.samples_s:,.1f} samples/s")
        if self.tflop_s:
            share = f" ({self.mfu:.0%} of the device)" if self.mfu else ""
            parts.append(f"{self.tflop_s:,.3g} TFLOP/s{share}")
        waits = [f"{name} {share:.0%}" for name, share in self.waits.items() if share >= _SHOWN]
        parts += [f"waits for {', '.join(waits)}"] if waits else []
        for tier, used in self.memory.items():
            sizes = format_bytes(used.now_bytes), format_bytes(used.peak_bytes)
            parts.append(f"{tier} {sizes[0]} (peak {sizes[1]})")
        return "; ".join(parts)


_NESTED = ("waits", "memory")
_INTEGERS = (torch.int64, torch.int32)


class StepCount(NamedTuple):
    """One optimizer step, with the calls since the previous one."""

    time_s: float
    tokens: int
    samples: int
    calls: int  # with gradients
    others: int = 0  # calls without them


def token_count(values: Iterable[Any]) -> int:
    """The elements of the largest matrix of integers among the inputs of a call."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    ids = (each for each in tensors if each.ndim == 2 and each.dtype in _INTEGERS)
    return max(map(torch.Tensor.numel, ids), default=0)


class Meter:
    """The meter of one model. `trace` makes a trace of it, `code` counts its compiled code, and
    `held` returns the bytes that it holds now in each memory except the device's."""

    def __init__(
        self,
        name: str,
        trace: Callable[[], Trace | None],
        code: Callable[[], int],
        held: Callable[[], dict[str, int]],
    ) -> None:
        self.name = name
        self.scenario: Any = None  # a `plan.scenario.Scenario` of the last figures
        self._steps: deque[StepCount] = deque(maxlen=_LAST)
        self._waits: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._trace, self._code, self._held = trace, code, held
        self._calls: dict[int, StepCount] = {}  # since the last step, by the module's id
        self._others = 0  # calls without gradients since then
        self._since = 0  # all calls since then
        self._last_s, self._last_code = 0.0, 0
        self._count = 0  # steps
        self._running: Trace | None = None
        self._ended: Trace | None = None
        self._done: Trace | None = None  # all of its work has run; not read yet

    def call(self, module: nn.Module, values: Iterable[Any]) -> None:
        """Count a call of the model, or of a module in it, with these inputs."""
        self._since += 1
        if self._since > _CALLS:
            self._stop()
        if not torch.is_grad_enabled():
            self._others += 1
            return
        given = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
        was = self._calls.get(id(module), StepCount(0.0, 0, 0, 0))
        samples, tokens = len(given[0]) if given else 0, token_count(given)
        self._calls[id(module)] = StepCount(
            0.0, was.tokens + tokens, was.samples + samples, was.calls + 1
        )

    def step(self) -> None:
        """Count an optimizer step, which begins now. A second optimizer's step, without a call in
        between, is part of the first."""
        if not self._calls:
            return
        now_s, code = time.perf_counter(), self._code()
        if self._count and code == self._last_code:  # else the step compiled code
            most = max(self._calls.values())  # the outermost module's
            time_s = now_s - self._last_s
            self._steps.append(most._replace(time_s=time_s, others=self._others))
        self._last_s, self._last_code = now_s, code
        self._others = self._since = 0
        self._calls.clear()
        for tier, size_bytes in self._held().items():
            self._peaks[tier] = max(self._peaks.get(tier, 0), size_bytes)
        self._sample(self._count % _EVERY)
        self._count += 1

    def steps(self) -> list[StepCount]:
        """The last steps, without those of an evaluation: they have more or fewer calls without
        gradients than most."""
        steps = list(self._steps)
        usual = statistics.mode(step.others for step in steps) if steps else 0
        return [step for step in steps if step.others == usual]

    def _sample(self, at: int) -> None:
        """Begin or end a trace before step `at` of every `_EVERY`."""
        if at == _FIRST:
            self._stop()  # the trace that Ctrl-C left, if this step is repeated
            self._running = self._trace()
            if self._running is not None:
                self._running.__enter__()
        elif at == _FIRST + _TRACED:
            self._ended = self._stop()
        elif at == _FIRST + _TRACED + 2:
            self._done, self._ended = self._ended or self._done, None

    def _stop(self) -> Trace | None:
        """End the running trace, if there is one, and return it."""
        running = self._running
        if running is not None:
            running.__exit__()
        self._running = None
        return running

    def waits(self) -> dict[str, float]:
        """The share of each stream in the critical path of the last traced steps."""
        if self._done is not None:
            found = traced_steps(self._done.measured, self.name)
            if found is not None:
                waited = found.waited_s.items()
                self._waits = {lane: s / found.step_s for lane, s in waited if lane != NONE}
            self._done = None
        return self._waits

    def memory(self, device: torch.device) -> dict[str, MemoryUse]:
        """Bytes now and at the peak. The device's are those of torch's allocator."""
        found = {}
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            found["device"] = MemoryUse(torch.cuda.memory_allocated(device), peak)
        for tier, now in self._held().items():
            found[tier] = MemoryUse(now, max(now, self._peaks.get(tier, 0)))
        return found
