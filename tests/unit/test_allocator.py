"""What megacompile() asks of the process: of the CUDA allocator, and of the garbage collector."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from megacompile import compat, megacompile

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told, in a process where nobody has told it anything."""
    told: list[str] = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back at the end
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", str, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    return told


def test_segments_may_grow_but_not_where_memory_was_taken_before(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it (an engine with memory pools of its own) has asked the environment before."""
    taken = {"segment.all.allocated": 3}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: taken if device else {})
    assert not compat.use_expandable_segments()
    assert said == [] and os.environ[NAMES[0]] == ""
    taken["segment.all.allocated"] = 0
    assert compat.use_expandable_segments()
    assert said == ["expandable_segments:True"]
    assert [os.environ[name] for name in NAMES] == 2 * ["expandable_segments:True"]


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_what_the_user_says_stays(
    said: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment, or by a call."""
    if name:
        monkeypatch.setenv(name, "expandable_segments:False")
    else:
        settings = "garbage_collection_threshold:0.8"
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    assert not compat.use_expandable_segments() and said == []


@pytest.mark.parametrize(("threshold", "frozen"), [(700, False), (0, False), (700, True)])
def test_the_collector_is_afterwards_as_before(threshold: int, frozen: bool) -> None:
    """Old objects are left out while a plan is made. Somebody may have frozen some, or never want
    the collector to run."""
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        if frozen:
            gc.freeze()
        count = gc.get_freeze_count()
        model = megacompile(torch.nn.Linear(4, 4), device="cpu", gpu_memory="1GiB")
        model(torch.ones(2, 4)).sum().backward()
        assert gc.get_threshold()[0] == threshold
        # other threads may let some of the frozen objects die
        assert 0.99 * count <= gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
