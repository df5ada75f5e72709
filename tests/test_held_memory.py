"""What a model holds already counts as memory for its buckets, if it is memory."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import pytest
import torch

from megacompile import host_memory
from megacompile.host_memory import budget_bytes

GIB = 2**30


def more_bytes(held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """By what a model that holds so much may take more than one that holds nothing."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 200 * GIB)  # the margin is constant
    return budget_bytes(held_bytes) - budget_bytes()


def test_memory_that_was_written_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(GIB // 16)
    assert more_bytes(weights.nbytes, monkeypatch) == weights.nbytes


def test_memory_that_nobody_has_written_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = more_bytes(64 * GIB, monkeypatch)
    assert before < 64 * GIB
    weights = torch.empty(GIB)
    assert more_bytes(64 * GIB, monkeypatch) - before < weights.nbytes / 16


def test_memory_that_processes_share_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets lie in such memory, and so does what `unmegacompile()` leaves."""
    before = more_bytes(64 * GIB, monkeypatch)
    shared = mmap.mmap(-1, GIB // 4)
    weights = torch.frombuffer(shared, dtype=torch.uint8).fill_(1)
    assert more_bytes(64 * GIB, monkeypatch) - before > 0.9 * weights.nbytes


def test_pages_of_a_file_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = more_bytes(64 * GIB, monkeypatch)
    assert before < 64 * GIB
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:  # /tmp may be memory
        file.write(bytes(GIB // 4))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        weights = torch.frombuffer(mapped, dtype=torch.uint8)
        assert weights.sum().item() == 0  # they are in RAM now
        assert more_bytes(64 * GIB, monkeypatch) - before < GIB // 8
        del weights
        mapped.close()
