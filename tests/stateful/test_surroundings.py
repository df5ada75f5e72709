"""What is around a megacompiled model: default devices, threads, tracers, kernels, odd dtypes.

Each gives what the plain model gives, or an error that says what to do.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacompile import ModelError, megacompile
from tests import inside
from tests.zoo import Inputs, assert_close, assert_same, equal, stack, stacks, twins

THREADS = 3

needs_compiler = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


def train(model: nn.Module, inputs: Inputs, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(**inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_default_device() -> None:
    plain, streamed, inputs = stacks()
    copied = copy.deepcopy(plain)
    torch.set_default_device("meta")
    try:
        made = megacompile(copied, device="cpu", lowering="eager")
        found = [train(model, inputs) for model in (streamed, made)]
    finally:
        torch.set_default_device(None)
    assert found == [train(plain, inputs)] * 2
    assert_same(plain, streamed)
    assert_same(plain, made)


def test_first_calls_in_threads() -> None:
    """What says that FX traces is of the process: another thread's call was refused, and all later
    ones where two tracers ended in another order than they began."""
    plain, inputs = stack()
    models = [twins(copy.deepcopy(plain))[1] for _ in range(THREADS + 1)]
    want = train(plain, inputs)
    begin = threading.Barrier(THREADS)

    def work(model: nn.Module) -> list[float]:
        begin.wait()
        return train(model, inputs)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, models[:THREADS])) == [want] * THREADS
    assert not torch.fx._symbolic_trace._is_fx_tracing_flag
    assert train(models[THREADS], inputs) == want


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"),
    reason="this torch always refuses",
)
def test_a_call_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is compiled already waits for nobody."""
    _, model, inputs = stacks()
    want = model(**inputs)
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    assert torch.equal(model(**inputs), want)


class Attention(nn.Module):
    """Attention whose kernels differ in their last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, -1, 3, 2, 16).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


class Attentions(nn.Module):
    """Layers of attention, of which some may choose their kernel."""

    def __init__(self, within: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.within = within

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, fourth = self.layers
        x = first(x)
        if self.within:
            with sdpa_kernel(SDPBackend.MATH):
                x = third(second(x))
        else:
            x = third(second(x))
        return fourth(x), x


@pytest.mark.parametrize("within", [False, True])
def test_the_kernel_of_attention_is_the_one_of_the_call(within: bool) -> None:
    """Also in a backward that is traced later, because other outputs were expected. What a captured
    graph sets is set for each of its stages, and for nothing else."""
    torch.manual_seed(0)
    plain, streamed = twins(Attentions(within))
    x = torch.randn(2, 100, 32)
    cuda: Any = torch.backends.cuda
    flash, math = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    kernels = [[flash, math]] * 3 if within else [[flash], [math], [flash]]
    for alone in (False, True):
        found = []
        for kernel in kernels:
            outputs = []
            for model in (plain, streamed):
                with sdpa_kernel(kernel):
                    last, other = model(x)
                assert cuda.math_sdp_enabled() and cuda.flash_sdp_enabled()
                loss = last.square().mean() if alone else last.mean() + other.mean()
                loss.backward()
                outputs.append(last.detach())
            assert equal(*outputs)
            found.append(outputs[0])
        assert equal(found[0], found[2]) and equal(found[0], found[1]) == within
        assert_same(plain, streamed)


TRACERS: dict[str, Callable[[Any, Inputs], Any]] = {
    "torch.func": lambda m, i: torch.func.grad(lambda x: m(x, i["y"]))(i["x"]),
    "torch.func, vmap": lambda m, i: torch.func.vmap(lambda x: m(x[None])[0])(i["x"]),
    "torch.export": lambda m, i: torch.export.export(m, (i["x"],)).module()(i["x"]),
    "torch.jit.trace": lambda m, i: torch.jit.trace(m, (i["x"],))(i["x"]),
}


@pytest.mark.filterwarnings("ignore")
def test_tracers_are_refused_and_take_a_copy() -> None:
    plain, streamed, inputs = stacks()
    for tracer in TRACERS.values():
        with pytest.raises(ModelError):
            tracer(streamed, inputs)
        wanted, got = (tracer(model, inputs) for model in (plain, copy.deepcopy(streamed)))
        assert equal(wanted.detach(), got.detach())
        assert train(plain, inputs, 1) == train(streamed, inputs, 1), "and it still works"
    assert_same(plain, streamed)


class Odd(nn.Module):
    """Has a parameter without elements and a complex one beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.factor = nn.Parameter(torch.full((4,), 0.5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([torch.tanh(self.first(x)), self.empty]) * self.factor
        return torch.view_as_real(hidden).square().sum()


@needs_compiler
@pytest.mark.filterwarnings("ignore:megacompile")
def test_odd_parameters_with_inductor() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Odd(), lowering="inductor")
    inputs = {"x": torch.randn(2, 4)}
    assert train(plain, inputs) == pytest.approx(train(streamed, inputs), rel=1e-5)
    assert_close(plain, streamed, 1e-5)


def test_dynamo_disabled_and_no_home() -> None:
    """In a process of its own: both are read when torch is imported."""
    program = (
        "from tests.zoo import stacks, assert_steps_same\n"
        "assert_steps_same(*stacks())\n"
        "print('the same')"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**environment, "TORCHDYNAMO_DISABLE": "1", "HOME": "/proc/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "the same" in result.stdout
    assert "megacompile" in result.stderr, "it says that it is not captured"
