"""The store of `torch.distributed`: what several processes see, and how long their groups wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacompile import compat
from tests.processes import group_of_one

CPU = torch.device("cpu")
C10D: Any = dist  # whose stubs leave its stores out


@pytest.mark.parametrize("timeout_s", [None, 7.0])
def test_a_group_of_one(timeout_s: float | None) -> None:
    """The first word in a store stands. A group says how long it waits, and can be ended."""
    with group_of_one(None if timeout_s is None else timedelta(seconds=timeout_s)):
        one, other = (compat.store("ours", timeout_s=5) for _ in range(2))
        assert one.compare_set("key", "", "first") == b"first"
        assert other.compare_set("key", "", "second") == b"first"
        assert not compat.store("others", timeout_s=5).check(["key"])
        assert other.add("count", 1) == 1 and one.add("count", 1) == 2
        assert one.delete_key("key") and not other.check(["key"])
        found = compat.group_timeout_s(dist.group.WORLD, CPU)
        assert found == (timeout_s or 1800, timeout_s is None)
        compat.abort(dist.group.WORLD)
        assert hasattr(dist.group.WORLD, "abort"), "with NCCL it ends what is under way"


def test_a_group_of_gpus_serves_the_host() -> None:
    with group_of_one(timedelta(seconds=7), "cuda:gloo"):
        group = dist.group.WORLD
        value = torch.ones(2)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(value)
        for _ in range(2):
            compat.serve_the_host(group, torch.device("cuda"))
            dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
        assert compat.group_timeout_s(group, CPU) == (7, False)


def test_a_store_that_is_gone_raises() -> None:
    there = C10D.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = C10D.TCPStore("127.0.0.1", there.port, is_master=False, timeout=timedelta(seconds=2))
    client.set("key", "value")
    del there
    with pytest.raises(compat.STORE_ERRORS):
        client.get("key")
