"""Updates of host memory, divided between the host and a device that helps."""

from __future__ import annotations

import contextlib
import functools
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
from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir.buckets import Bucket
from megacompile.options import Options
from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim.kernels.bucket import update_bucket
from megacompile.runtime.optim.registry import RULES
from megacompile.runtime.optim.rule import OptimizerRule, State, Update
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates import chunks as moving
from megacompile.runtime.updates.chunks import ChunkStreams
from megacompile.runtime.updates.update import UpdatePath
from megacompile.runtime.updates.workers import Job, Pace, Workers
from megacompile.tracing.timeline import DEVICE, HOST
from tests import inside
from tests.interrupts import traced
from tests.stateful.late import AtCall

CPU = torch.device("cpu")
ADAM, SGD_RULE, _ = RULES


# --- chunks


def some_update(rule: OptimizerRule, numel: int, *, state: str, copy: bool = False) -> Update:
    generator = torch.Generator().manual_seed(numel)

    def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel, generator=generator).to(dtype)

    states: list[State | None] = []
    for k in range(len(rule.moments)):
        if state == "int8":
            states.append(blockwise.quantize(values().abs(), signed=k == 0))
        else:
            states.append(values().abs() if k < 2 and state == "fp32" else None)
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": True}
    hyper = rule.hyper({**group, "betas": (0.9, 0.99), "eps": 1e-8}, step=3, scale=0.5)
    param = values() if copy else values(torch.bfloat16)
    return Update(
        param=param,
        grad=values(torch.bfloat16),
        states=tuple(states),
        hyper=hyper,
        copy=param.to(torch.bfloat16) if copy else None,
    )


def clone(whole: Update) -> Update:
    return whole.map(lambda _, tensor: tensor.clone())


def assert_same(given: Update, wanted: Update) -> None:
    for (name, got), (_, want) in zip(given.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(got, want), name


def chunks_of(
    monkeypatch: pytest.MonkeyPatch, buffers: int, size_bytes: int
) -> tuple[moving.Chunks, list[str]]:
    """Chunks on streams of the CPU, and what was waited for and begun."""
    log: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            self.k = sum(entry.startswith("begin") for entry in log)

        def record(self) -> None:
            log.append(f"begin {self.k}")

        def synchronize(self) -> None:
            log.append(f"end {self.k}")

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    streams: Any = ChunkStreams.__new__(ChunkStreams)
    nothing = dict.fromkeys(("wait_event", "wait_stream"), lambda other: None)
    for name in ("h2d", "compute", "d2h"):
        wait = functools.partial(log.append, name)
        setattr(streams, name, SimpleNamespace(device=CPU, synchronize=wait, **nothing))
    here = moving.Chunks.__new__(moving.Chunks)
    here.streams, here.device, here.buffer_bytes, here.ours = streams, CPU, size_bytes, None
    here.buffers = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(buffers)]
    return here, log


@pytest.mark.parametrize(
    ("rule", "state", "copy"),
    [(ADAM, "fp32", True), (ADAM, "int8", False), (SGD_RULE, "none", False)],
)
def test_pieces_make_the_same_update(
    monkeypatch: pytest.MonkeyPatch, rule: OptimizerRule, state: str, copy: bool
) -> None:
    whole = some_update(rule, 100_003, state=state, copy=copy)
    apart = clone(whole)
    here, log = chunks_of(monkeypatch, 2, 2**18)
    here.update([(rule, apart)])
    update_bucket(rule, [whole])
    assert_same(apart, whole)
    assert log.count("end 0") == 1 and "begin 1" in log


def test_a_piece_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer goes back to the allocator, while a copy into it may be under way."""
    here, log = chunks_of(monkeypatch, 1, 2**20)
    rule: Any = object()  # no rule: no such kernel
    with pytest.raises(AttributeError):
        here.update([(rule, some_update(SGD_RULE, 4096, state="none"))])
    assert log == ["h2d", "compute", "d2h"]


def test_an_update_begins_while_the_one_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit states are updated parameter by parameter: the link would be idle between two."""
    small = [some_update(SGD_RULE, 4096, state="fp32", copy=True) for _ in range(3)]
    wanted = [clone(each) for each in small]
    here, log = chunks_of(monkeypatch, 2, 2**20)
    here.update([(SGD_RULE, each) for each in small])
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 2", "end 1"]
    update_bucket(SGD_RULE, wanted)
    for each, whole in zip(small, wanted, strict=True):
        assert_same(each, whole)


# --- who makes which


class Made:
    """An update that only says who made it."""

    def __init__(self, name: str, log: list[str], *, on_device: bool = True) -> None:
        self.name, self.log, self.on_device = name, log, on_device
        self.way, self.numel = UpdatePath.COMPILED, 10
        self.runs: list[Any] = [SimpleNamespace(update=f"of {name}")]
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

    def by_chunks(self, chunks: Any) -> None:
        del chunks
        self._make("device")


def working(**given: Any) -> Workers:
    """The two of them, without a device."""
    here: Any = {"streams": lambda device: device, "chunks": lambda streams, updates: streams}
    return Workers(CPU, **here | given)


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


def begun(two: Workers, made: list[Made]) -> list[Job]:
    """Their jobs, of which the host has begun the first one; it goes on when that `may`."""
    made[0].may.clear()
    all_jobs = jobs(*made)
    for job in all_jobs:
        two.submit(job)
    assert made[0].began.wait(60)
    return all_jobs


def test_the_device_makes_in_order_what_the_host_leaves(two: Workers) -> None:
    log: list[str] = []
    made = [Made(name, log) for name in "abcde"]
    all_jobs = begun(two, made)
    two.help(futures(all_jobs))
    over(all_jobs[1:])
    made[0].may.set()
    over(all_jobs)
    assert log == [*(f"{name} by device" for name in "bcde"), "a by host"]


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
    all_jobs = jobs(*(Made(name, log) for name in "abc"))
    for job in all_jobs:
        two.submit(job)
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


def test_a_pace_that_was_slow_by_chance_is_forgotten() -> None:
    pace, update = Pace(), jobs(Made("", []))[0].update
    assert pace.seconds(update) is None
    for seconds in (2.0, 4.0):
        pace.learn(update, seconds)
        pace.begin()
    assert pace.seconds(update) == 4.0, "it was learned in the step before"
    found = []
    for _ in range(4):
        pace.begin()
        found.append(pace.seconds(update))
    assert found == pytest.approx([3.2, 2.56, 2.048, 2.0])


def test_each_is_made_once(two: Workers) -> None:
    for _ in range(100):
        log: list[str] = []
        all_jobs = jobs(*(Made(str(i), log) for i in range(8)))
        for job in all_jobs:
            two.submit(job)
        two.help(futures(all_jobs))
        over(all_jobs)
        assert sorted(entry.split()[0] for entry in log) == [str(i) for i in range(8)]


def test_what_the_device_cannot_make_is_the_hosts_and_an_error_is_one_updates(
    two: Workers,
) -> None:
    log: list[str] = []
    made = [Made("a", log), Made("b", log), Made("c", log, on_device=False), Made("d", log)]
    made[3].error = ArithmeticError("out of numbers")
    all_jobs = begun(two, made)
    two.help(futures(all_jobs))
    all_jobs[1].future.result(60)
    with pytest.raises(ArithmeticError):
        all_jobs[3].future.result(60)
    made[0].may.set()
    all_jobs[2].future.result(60)
    assert log == ["b by device", "d by device", "a by host", "c by host"]


def test_without_device_memory_the_host_makes_all() -> None:
    def none_left(streams: Any, updates: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    two = working(chunks=none_left)
    log: list[str] = []
    made = [Made(name, log) for name in "ab"]
    all_jobs = begun(two, made)
    two.help(futures(all_jobs))
    made[0].may.set()
    over(all_jobs)
    assert log == ["a by host", "b by host"]


def test_the_host_may_begin_the_last_one_while_the_device_gets_ready() -> None:
    """What an update consists of is gone once somebody makes it."""
    log: list[str] = []

    class Runs(Made):
        def __call__(self) -> None:
            self.runs = []
            super().__call__()

    made = [Made("a", log), Runs("b", log)]
    made[0].may.clear()
    both = jobs(*made)

    def streams(device: torch.device) -> torch.device:  # takes its time the first time
        made[0].may.set()
        both[1].future.result(60)
        return device

    taken: list[Any] = []
    two = working(streams=streams, chunks=lambda streams, updates: taken.extend(updates))
    for job in both:
        two.submit(job)
    assert made[0].began.wait(60)
    two.help(futures(both))
    assert taken == ["of b"]


def test_an_interrupted_submit_leaves_nobody_behind(two: Workers) -> None:
    log: list[str] = []
    left, *others = jobs(*(Made(name, log) for name in "abc"))
    with pytest.raises(KeyboardInterrupt), traced(AtCall("submit", 2, KeyboardInterrupt())):
        two.submit(left)  # it calls that of its thread
    for job in others:
        two.submit(job)
    over(others)
    assert log == ["a by host", "b by host", "c by host"]


def test_an_interrupted_wait_leaves_the_guards() -> None:
    """Ctrl-C while a parameter is waited for: its update goes on behind, and the next use waits."""
    model = nn.Linear(4, 4)
    layout = Bucket.layout(0, "only", [(n, p.detach()) for n, p in model.named_parameters()])
    bucket = HostBucket(layout, tuple(model.parameters()), pin=False)
    waits = iter([KeyboardInterrupt(), None])

    def wait() -> None:
        if (interrupt := next(waits)) is not None:
            raise interrupt
        work.done = lambda: True

    work: Any = SimpleNamespace(
        fresh={}, event=lambda part: None, ahead=lambda part: None, done=lambda: False, wait=wait
    )
    bucket.pending.start(work, [0, 1], [])
    with pytest.raises(KeyboardInterrupt):
        model.weight.sum()
    assert bucket.pending.busy()
    model.weight.sum()
    assert next(waits, "over") == "over" and not bucket.pending.busy()


# --- when


@pytest.mark.parametrize(
    ("options", "helps"),
    [
        ({"lowering": "inductor"}, True),
        ({"lowering": "inductor", "device_update": 0.5}, True),
        ({"lowering": "inductor", "device_update": 0}, False),
        ({"lowering": "inductor", "stochastic_rounding": True}, False),
        ({"lowering": "eager"}, False),
        ({"lowering": "inductor", "disk": "/tmp"}, True),
        ({"lowering": "inductor", "disk": "/tmp", "disk_weights": True}, False),
    ],
)
def test_who_is_helped(options: dict[str, Any], helps: bool) -> None:
    made = Options.resolve(device="cpu", **options)
    assert made.device_helps is helps
    assert OptimizerCost.of(made, on_gpu=True).helped is helps
    assert not OptimizerCost.of(made).helped


# --- on a GPU: who made an update shows in nothing but the time


_WIDTH = 1024  # a bucket has more elements than the least that the device helps with


class ByDevice(Workers):
    """The host leaves all to the device."""

    def _for_host(self) -> Job | None:
        return None


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4096), nn.GELU(), nn.Linear(4096, _WIDTH))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


_CASES: dict[str, tuple[torch.dtype, dict[str, Any], Callable[[nn.Module], Optimizer]]] = {
    "adamw": (torch.float32, {}, lambda m: AdamW(m.parameters(), lr=1e-3)),
    "masters": (
        torch.float32,
        {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
        lambda m: AdamW(m.parameters(), lr=1e-3),
    ),
    "int8": (torch.bfloat16, {"state_dtype": "int8"}, lambda m: AdamW(m.parameters(), lr=1e-3)),
    "nesterov": (
        torch.float32,
        {},
        lambda m: SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", _CASES)
def test_host_and_device_round_alike(case: str) -> None:
    """All by the host, all by the device, and divided: the same bits everywhere.

    The gradients are given: a kernel that sums may do so in another order when compiled again.
    """
    dtype, options, make = _CASES[case]

    def trained(by_device: bool = False, **other: Any) -> tuple[list[torch.Tensor], set[str]]:
        torch.manual_seed(0)
        model = _Net().to(dtype)
        optimizer = make(model)
        model = megacompile(
            model, lowering="inductor", resident=0, progress=False, **options, **other
        )
        if by_device:
            inside.update_by(model, ByDevice(torch.device("cuda")))
        x = torch.randn(16, _WIDTH, dtype=dtype, device="cuda")
        generator = torch.Generator().manual_seed(1)
        with trace(model) as traced:
            for _ in range(5):
                model(x).backward()
                for param in model.parameters():
                    size = 10 ** (4 * torch.rand(param.shape, generator=generator) - 4)
                    assert param.grad is not None
                    param.grad.copy_(size * torch.randn(param.shape, generator=generator))
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
                optimizer.step()
                optimizer.zero_grad()
            found = [param.detach().clone() for param in model.parameters()]
        saved = optimizer.state_dict()["state"]
        for state in saved.values():
            found += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
        lanes = {span.op.lane for span in traced.spans}
        torch.compiler.reset()
        return found, lanes & {HOST, DEVICE}

    alone, by = trained(device_update=0)
    assert by == {HOST}
    # a share that no bucket fits into: the device helps, and nothing is left for the step
    divided, by = trained(device_update=1e-9)
    assert DEVICE in by
    by_device, by = trained(by_device=True, device_update=1e-9)
    assert by == {DEVICE}
    for want, *others in zip(alone, divided, by_device, strict=True):
        for got in others:
            torch.testing.assert_close(got, want, rtol=0, atol=0)
