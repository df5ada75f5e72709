"""When an update is launched, and when it runs in torch: the test holds the compiler back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megacompile.runtime.optim.rule import Launch, OptimizerRule, Update, launches
from megacompile.runtime.optim.rules import RULES
from megacompile.runtime.updates.bucket_update import KernelCompiler, small_update
from tests.processes import in_child, python

ADAM = RULES[0]
CPU = torch.device("cpu")


def made(
    numel: int, dtype: torch.dtype = torch.float32, copy: Tensor | None = None
) -> list[Launch]:
    """The launch of an update with 8-bit and plain states."""
    codes = torch.zeros(numel, dtype=torch.uint8), torch.zeros(-(-numel // 256))
    states = (codes, torch.zeros(numel, dtype=dtype), None)
    param = torch.zeros(numel, dtype=dtype)
    update = Update(param, torch.zeros(numel), states, (1.0,) * 8, copy=copy, seed=7)
    return list(launches(ADAM, [update]))


class Held:
    """A compiler that waits until it may go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.calls: list[Launch] = []
        self.error: Exception | None = None

    def __call__(self, rule: OptimizerRule, like: Launch, device: torch.device) -> None:
        self.calls.append(like)
        assert self.goes_on.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def held() -> Iterator[Held]:
    compiler = Held()
    yield compiler
    compiler.goes_on.set()


def until_ready(compiler: KernelCompiler, each: list[Launch]) -> None:
    while not compiler.ready(ADAM, each, CPU):
        threading.Event().wait(0.01)


def test_a_small_update_is_launched_once_its_kernel_is_compiled(held: Held) -> None:
    compiler, each = KernelCompiler(held), made(300)
    assert not compiler.ready(ADAM, each, CPU)
    assert not compiler.ready(ADAM, each, CPU)
    held.goes_on.set()
    until_ready(compiler, each)
    assert compiler.ready(ADAM, made(500), CPU)  # the same kernel
    assert len(held.calls) == 1


def test_a_large_update_waits_for_its_kernel(held: Held) -> None:
    compiler, large = KernelCompiler(held), [made(16)[0]._replace(params=5000)]
    assert compiler.ready(ADAM, large, CPU)  # nothing is begun: the launch compiles
    assert not compiler.ready(ADAM, made(16), CPU)
    threading.Timer(0.05, held.goes_on.set).start()
    assert compiler.ready(ADAM, large, CPU)
    assert held.goes_on.is_set() and len(held.calls) == 1


def test_another_kind_of_update_needs_another_kernel(held: Held) -> None:
    compiler = KernelCompiler(held)
    held.goes_on.set()
    until_ready(compiler, made(256))
    assert not compiler.ready(ADAM, made(257), CPU)  # not aligned
    until_ready(compiler, made(257))


def test_a_kernel_that_does_not_compile_is_launched_for_its_error(held: Held) -> None:
    compiler, held.error = KernelCompiler(held), RuntimeError("no compiler")
    assert not compiler.ready(ADAM, made(16), CPU)
    held.goes_on.set()
    until_ready(compiler, made(16))


def test_a_fork_waits_for_the_compiler(held: Held) -> None:
    """A child of a fork would keep the locks of the thread that compiles."""
    compiler = KernelCompiler(held)
    assert not compiler.ready(ADAM, made(16), CPU)
    threading.Timer(0.05, held.goes_on.set).start()
    assert in_child(held.goes_on.is_set)


LATE = """
import threading
from tests.unit.test_bucket_update import ADAM, CPU, KernelCompiler, made

def late():
    threading.main_thread().join()
    compiler = KernelCompiler(lambda *given: print("compiled", flush=True))
    while not compiler.ready(ADAM, made(16), CPU):
        pass

threading.Thread(target=late).start()
"""


def test_updates_after_the_main_thread_has_ended() -> None:
    done = python("-c", LATE)
    assert (done.stdout.split(), done.stderr) == (["compiled"], "")


@pytest.mark.parametrize("numel", (256, 257))
def test_what_the_thread_compiles_is_the_kernel_of_the_launch(numel: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        copy = None if dtype == torch.bfloat16 else torch.zeros(numel, dtype=torch.bfloat16)
        (like,) = made(numel, dtype, copy)
        (small,) = launches(ADAM, [small_update(like, CPU)])
        assert (small.signature, small.columns) == (like.signature, like.columns)
