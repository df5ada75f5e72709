"""Tests that need a GPU are skipped, with the reason, where there is none."""

from __future__ import annotations

import os

import pytest
import torch

pytest.register_assert_rewrite("tests.faults", "tests.zoo")  # they assert for the tests
torch.set_num_threads(1)  # the models are small: threads cost more than they gain
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is first imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """Captured graphs of one test do not count towards another's recompilations."""
    torch.compiler.reset()
