"""Page-locked memory is found by trying: what the system refuses is pageable, slower and known."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import explain, megacompile, page_locks
from megacompile.cost.hardware import H200
from megacompile.cost.pageable import SHARE, with_pageable
from megacompile.page_locks import PageLocks, pinned_empty
from megacompile.plan import setting as setting_module
from megacompile.plan.setting import Setting
from megacompile.runtime.device import buffers
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.model.lookup import streamed_model

MIB = 2**20


class System:
    """Locks so many bytes, as WSL 2 does, and notes what was asked for."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append(size)
        if sum(self.locked.values()) + size > self.limit_bytes:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    made = System(4 * MIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    locks = PageLocks()
    for module in (buffers, page_locks, setting_module):
        monkeypatch.setattr(module, "PAGE_LOCKS", locks)
    return made


@pytest.mark.filterwarnings("ignore:megacompile. cudaHostRegister")
def test_what_was_refused_is_not_asked_for_again(system: System) -> None:
    locks = page_locks.PAGE_LOCKS
    first = HostBuffer(3 * MIB, pin=True)
    assert first.locked and not locks.pageable_bytes
    refused = HostBuffer(2 * MIB, pin=True)
    assert not refused.locked and locks.limit_bytes == 3 * MIB
    again, small = HostBuffer(2 * MIB, pin=True), HostBuffer(MIB, pin=True)
    assert not again.locked and small.locked
    assert system.asked == [3 * MIB, 2 * MIB, MIB]
    assert (locks.locked_bytes, locks.pageable_bytes) == (4 * MIB, 4 * MIB)
    refused.lock()  # a buffer that was refused is left alone
    assert system.asked == [3 * MIB, 2 * MIB, MIB]
    del refused, again, first
    gc.collect()
    assert (locks.locked_bytes, locks.pageable_bytes) == (MIB, 0)
    assert list(system.locked.values()) == [MIB]
    assert HostBuffer(2 * MIB, pin=True).locked, "there is room again"


def test_it_is_said_once_and_torch_forgets_the_error(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps the error of a refusal, and the next kernel would raise it: one that may."""
    kernels: list[Any] = []

    def ones(*args: Any, **given: Any) -> torch.Tensor:
        kernels.append(given["device"])
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.warns(UserWarning, match=r"cudaHostRegister of 5 MiB failed with error 2, with 0"):
        HostBuffer(5 * MIB, pin=True)
    assert kernels == ["cuda"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostBuffer(4 * MIB + 4096, pin=True)
    assert kernels == ["cuda", "cuda"]


def test_small_buffers_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.empty

    def empty(*args: Any, **given: Any) -> torch.Tensor:
        if given.pop("pin_memory", False):
            raise RuntimeError("CUDA error: operation not supported")
        return stock(*args, **given)

    monkeypatch.setattr(torch, "empty", empty)
    made = pinned_empty((2, 3), torch.float32)
    assert made.shape == (2, 3) and made.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:megacompile. cudaHostRegister")
def test_a_budget_knows_what_is_locked(system: System) -> None:
    budget = HostBudget()
    kept = [budget.make(3 * MIB, "a bucket", pin=True) for _ in range(2)]
    assert budget.held_bytes == 6 * MIB and budget.locked_bytes == 3 * MIB
    del kept[0]
    gc.collect()
    assert budget.locked_bytes == 0


def test_copies_are_slower_by_the_share_that_is_pageable() -> None:
    assert with_pageable(H200, 10 * MIB) is H200
    some = H200.replace(locked_bytes=5 * MIB)
    assert with_pageable(some, 5 * MIB) is some
    half = with_pageable(some, 10 * MIB)
    assert half.h2d_gb_s == pytest.approx(H200.h2d_gb_s / (0.5 + 0.5 / SHARE))
    none = with_pageable(H200.replace(locked_bytes=0), MIB)
    assert none.d2h_both_gb_s == pytest.approx(SHARE * H200.d2h_both_gb_s)
    assert none.matmul_tflop_s == H200.matmul_tflop_s


def test_plans_count_with_it_and_explain_says_it() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    megacompile(model, device="cpu", lowering="eager")
    model(torch.ones(2, 64)).sum().backward()
    machine = H200.replace(h2d_gb_s=1e-3, h2d_both_gb_s=1e-3)
    fast = explain(model, hardware=machine, changes=False)
    slow = explain(model, hardware=machine.replace(locked_bytes=0), changes=False)
    assert slow.step_s > 1.5 * fast.step_s
    assert fast.locked_bytes is None and "page-locked" not in str(fast)
    assert slow.locked_bytes == 0 and "page-locked" in str(slow)
    assert slow.to_dict()["locked_bytes"] == 0


@pytest.mark.filterwarnings("ignore:megacompile. cudaHostRegister")
def test_rates_have_the_limit_that_was_found(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    megacompile(model, device="cpu")
    options = streamed_model(model, "test").options
    on_gpu = SimpleNamespace(device=torch.device("cuda"), disk=None)
    setting = Setting(options)
    object.__setattr__(setting, "options", on_gpu)
    monkeypatch.setattr(setting_module, "load", lambda device: H200)
    assert setting.rates().locked_bytes is None
    kept = [HostBuffer(3 * MIB, pin=True) for _ in range(2)]
    assert setting.rates().locked_bytes == 3 * MIB
    assert len(kept) == 2
