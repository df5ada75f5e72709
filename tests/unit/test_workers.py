"""Updates of host memory, divided between the host and a device that helps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import megacompile, trace
from megacompile.errors import OptimizerError
from megacompile.runtime.updates.workers import Job, Workers
from tests import inside
from tests.interrupts import traced
from tests.stateful.late import AtCall

CPU = torch.device("cpu")


class Made:
    """An update that only says who made it."""

    backend, numel = "a kind", 10

    def __init__(self, name: str, log: list[str], *, on_device: bool = True) -> None:
        self.name, self.log, self.on_device = name, log, on_device
        self.runs: list[Any] = [f"of {name}"]
        self.bucket = SimpleNamespace(layout=SimpleNamespace(name=name))
        self.may = threading.Event()
        self.may.set()
        self.began = threading.Event()
        self.error: BaseException | None = None

    def _make(self, who: str) -> None:
        self.began.set()
        assert self.may.wait(60)
        self.log.append(f"{self.name} by {who}")
        if self.error is not None:
            raise self.error

    def __call__(self) -> None:
        self._make("host")

    def by_chunks(self, make: Any) -> None:
        self._make("device")


def working(**given: Any) -> Workers:
    """The two of them, without a device."""
    workers = Workers(CPU)
    here: dict[str, Any] = {
        "make_streams": lambda device: device,
        "make_chunks": lambda streams, updates: SimpleNamespace(update=None),
    }
    for name, value in (here | given).items():
        setattr(workers, name, value)
    return workers


@pytest.fixture
def two() -> Workers:
    return working()


def jobs(*updates: Made) -> list[Job]:
    return [Job(each) for each in updates]  # type: ignore[arg-type]


def futures(waiting: list[Job]) -> set[Future[None]]:
    return {job.future for job in waiting}


def over(waiting: list[Job]) -> None:
    for job in waiting:
        job.future.result(60)


def submitted(two: Workers, *updates: Made) -> list[Job]:
    found = jobs(*updates)
    for job in found:
        two.submit(job)
    return found


def begun(two: Workers, made: list[Made]) -> list[Job]:
    """Their jobs, of which the host has begun the first one; it goes on when that `may`."""
    made[0].may.clear()
    found = submitted(two, *made)
    assert made[0].began.wait(60)
    return found


def paced(two: Workers, host_s: float, device_s: float) -> None:
    """They know how long they take for an update."""
    for pace, seconds in ((two._host_pace, host_s), (two._device_pace, device_s)):
        pace.learn(jobs(Made("", []))[0].update, seconds)


@pytest.mark.parametrize(
    ("host_s", "first"),
    [(10.0, "a"), (25.0, "c"), (51.0, None)],  # the device: 10 s
)
def test_the_host_takes_what_it_ends_before_the_device_would(
    two: Workers, host_s: float, first: str | None
) -> None:
    paced(two, host_s, 10.0)
    waiting = jobs(*(Made(name, []) for name in "abcde"))
    two._waiting.extend(waiting)
    assert two._for_host() is waiting[0], "nobody helps"
    two._waiting.appendleft(waiting[0])
    two._helped.append(futures(waiting))
    taken = two._for_host()
    assert taken is (None if first is None else waiting["abcde".index(first)])
    assert list(two._waiting) == [job for job in waiting if job is not taken]
    two._device_ends_s = time.perf_counter() + 60.0
    two._waiting.appendleft(waiting[0])
    assert two._for_host() is waiting[0], "what the device does now is ahead of what waits"


@pytest.mark.parametrize(("comes", "who"), [(True, "device"), (False, "host")])
def test_a_slow_host_leaves_the_first_one_to_a_device_that_comes(comes: bool, who: str) -> None:
    """And does not wait for one that does not."""
    two = working(patience_s=60 if comes else 0.1)
    paced(two, 1000.0, 1e-6)
    log: list[str] = []
    all_jobs = submitted(two, *(Made(name, log) for name in "abc"))
    if comes:
        two.help(futures(all_jobs))
    over(all_jobs)
    assert log == [f"{name} by {who}" for name in "abc"]


def test_what_the_device_leaves_after_all_is_the_hosts(two: Workers) -> None:
    """It fails in what it knows of it; nobody else would come."""
    paced(two, 1000.0, 1e-6)
    log: list[str] = []
    all_jobs = jobs(Made("a", log), Made("b", log))
    two._helped.append(futures(all_jobs))
    for job in all_jobs:
        two.submit(job)
    two._host.submit((looked := threading.Event()).set)
    assert looked.wait(60) and not log
    two._helped.clear()
    two._by_device(None, set())  # type: ignore[arg-type]
    over(all_jobs)
    assert log == ["a by host", "b by host"]


def test_each_is_made_once(two: Workers) -> None:
    for _ in range(100):
        log: list[str] = []
        all_jobs = submitted(two, *(Made(str(i), log) for i in range(8)))
        two.help(futures(all_jobs))
        over(all_jobs)
        assert sorted(entry.split()[0] for entry in log) == [str(i) for i in range(8)]


def test_the_device_makes_in_order_what_it_can_and_an_error_is_one_updates(two: Workers) -> None:
    log: list[str] = []
    made = [Made("a", log), Made("b", log), Made("c", log, on_device=False), Made("d", log)]
    made[3].error = ArithmeticError("out of numbers")
    all_jobs = begun(two, made)
    two.help(futures(all_jobs))
    all_jobs[1].future.result(60)
    with pytest.raises(OptimizerError, match="ArithmeticError: out"):
        all_jobs[3].future.result(60)
    made[0].may.set()
    all_jobs[2].future.result(60)
    assert log == ["b by device", "d by device", "a by host", "c by host"]


def test_the_host_may_begin_the_last_one_while_the_device_gets_ready() -> None:
    """What an update consists of is gone once somebody makes it."""
    log: list[str] = []

    class Runs(Made):
        def __call__(self) -> None:
            self.runs = []
            super().__call__()

    made = [Made("a", log), Runs("b", log)]

    def streams(device: torch.device) -> torch.device:  # takes its time the first time
        made[0].may.set()
        both[1].future.result(60)
        return device

    taken: list[Any] = []

    def chunks(streams: Any, updates: Any) -> Any:
        taken.extend(updates)
        raise torch.OutOfMemoryError("CUDA out of memory")  # then the host makes all

    two = working(make_streams=streams, make_chunks=chunks)
    both = begun(two, made)
    two.help(futures(both))
    over(both)
    assert taken == ["of b"] and log == ["a by host", "b by host"]


def test_an_interrupted_submit_leaves_nobody_behind(two: Workers) -> None:
    log: list[str] = []
    left, *others = jobs(*(Made(name, log) for name in "abc"))
    with pytest.raises(KeyboardInterrupt), traced(AtCall("submit", 2, KeyboardInterrupt())):
        two.submit(left)  # it calls that of its thread
    for job in others:
        two.submit(job)
    over(others)
    assert log == ["a by host", "b by host", "c by host"]


def test_what_follows_work_that_raises_is_done(
    two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    two._host.submit(lambda: [].pop())
    assert two._host.call(lambda: 7) == 7
    assert [each.exc_type for each in said] == [IndexError]


_WIDTH = 1024  # a bucket has more elements than the least that the device helps with


class ByDevice(Workers):
    """The host leaves to the device what the device may update."""

    def _for_host(self) -> Job | None:
        for job in tuple(self._waiting):
            if not job.update.on_device and self._take(job):
                return job
        return None


def _net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(_WIDTH, 4096), nn.GELU(), nn.Linear(4096, _WIDTH)) for _ in range(3)
    )
    return nn.Sequential(*layers).to(dtype)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


def nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


BF16 = torch.bfloat16
_CASES: dict[str, tuple[torch.dtype, dict[str, Any], Callable[[nn.Module], Optimizer]]] = {
    "masters": (torch.float32, {"compute_dtype": BF16, "grad_dtype": BF16}, adamw),
    "int8": (BF16, {"state_dtype": "int8"}, adamw),
    "nesterov": (torch.float32, {}, nesterov),
}


@pytest.mark.gpu(long=True)
@pytest.mark.parametrize("case", _CASES)
def test_host_and_device_round_alike(case: str) -> None:
    """All by the host, all by the device, and divided: the same bits. The gradients are given:
    kernels that sum may differ."""
    dtype, options, make = _CASES[case]
    generator = torch.Generator().manual_seed(1)
    drawn = 10 ** (4 * torch.rand(2**16, generator=generator) - 4)  # of many sizes
    drawn *= torch.randn(2**16, generator=generator)

    def trained(by_device: bool = False, **other: Any) -> tuple[list[torch.Tensor], set[str]]:
        model = _net(dtype)
        optimizer = make(model)
        model = megacompile(
            model, lowering="inductor", resident=0, progress=False, **options, **other
        )
        if by_device:
            inside.update_by(model, ByDevice(torch.device("cuda")))
        x = torch.randn(16, _WIDTH, dtype=dtype, device="cuda")
        with trace(model) as recorded:
            for k in range(5):
                model(x).float().square().mean().backward()
                for param in model.parameters():
                    assert param.grad is not None
                    values = drawn.roll(1000 * k).expand(-(-param.numel() // len(drawn)), -1)
                    param.grad.copy_(values.reshape(-1)[: param.numel()].view(param.shape))
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
                optimizer.step()
                optimizer.zero_grad()
            found = [param.detach().clone() for param in model.parameters()]
        for state in optimizer.state_dict()["state"].values():
            found += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
        lanes = {span.op.lane for span in recorded.spans}
        torch.compiler.reset()
        return found, lanes & {"host", "device"}

    alone, by = trained(device_update=0)
    assert by == {"host"}
    # a share that no bucket fits into: the device helps, and nothing is left for the step
    divided, by = trained(device_update=1e-9)
    assert "device" in by
    by_device, by = trained(by_device=True, device_update=1e-9)
    assert by == {"device"}
    for want, *others in zip(alone, divided, by_device, strict=True):
        for got in others:
            torch.testing.assert_close(got, want, rtol=0, atol=0)
