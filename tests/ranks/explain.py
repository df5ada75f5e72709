"""Ranks whose rates and whose work are not the same, and what `explain` says of them."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megacompile as package
from megacompile.cost import ranks, rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.errors import TraceError
from tests.ranks.here import Check, Here

CPU = torch.device("cpu")
FAST = H200.replace(matmul32_tflop_s=1e-2, launch_s=0.0, copy_s=0.0, sustained=1.0)
RATES = (FAST, FAST.replace(matmul32_tflop_s=8e-3, h2d_gb_s=30.0, host_memory_gb_s=100.0))
LAYERS = 3
STEPS = 4
MICRO = 2  # batches of the step of the last trace
WIDTH, ROWS, MORE = 256, 64, 256  # the last rank has so many times the rows


class Net(nn.Module):
    """Some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: Tensor = x.square().mean()
        return result


class Loop:
    """A model that ranks share, and its rows."""

    def __init__(self, here: Here, rows: int = ROWS) -> None:
        torch.manual_seed(0)
        self.model = package.megacompile(Net(), mesh=here.mesh, device="cpu", progress=False)
        self.data = torch.randn(rows, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, micro: int = 1) -> None:
        for _ in range(micro):
            self.model(self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def explained(self, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = package.explain(self.model, changes=False, **options).to_dict()
        return found


@contextmanager
def hosts(here: Here) -> Iterator[None]:
    """Each rank is on a host of its own, where no rates are on file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: f"host{here.rank}")
        patch.setitem(os.environ, "XDG_CACHE_HOME", str(here.folder / f"rates of {here.rank}"))
        yield


def _keep(hardware: Hardware) -> None:
    path = rates._file(CPU)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(hardware)))


def slow_ranks(here: Here) -> None:
    """Who is behind in a rate, and who came last in traced steps."""
    with hosts(here):
        _slow_ranks(here)


def _slow_ranks(here: Here) -> None:
    unknown = Loop(here)
    unknown.step()
    if here.rank == 0:
        _keep(RATES[0])
    one_has_rates = Loop(here)
    one_has_rates.step()
    _keep(RATES[here.rank])
    loop = Loop(here, ROWS * (MORE if here.rank else 1))
    loop.step()
    all_have = loop.explained()
    for found in (
        unknown.explained(),
        one_has_rates.explained(),
        loop.explained(hardware=H200),
    ):
        assert found["slow_ranks"] == () and found["ranks"] == 2
        assert "interconnect" in found["bounds"]
    slow = {each["rate"]["name"]: each for each in all_have["slow_ranks"]}
    assert set(slow) == {"fp32 matrix products", "copies to the GPU", "host memory"}
    products = slow["fp32 matrix products"]
    assert products["rate"]["ranks"] == (1,) and products["rate"]["behind"] > 0.19
    assert products["rate"]["hosts"] == ("host1",) and all_have["hosts"] == ("host0", "host1")
    assert products["shorter"] == max(each["shorter"] for each in slow.values()) > 0.1
    said = here.all_say(sorted(str(each["rate"]) for each in all_have["slow_ranks"]))
    assert said[0] == said[1], "one of them may print"
    with package.trace(loop.model) as trace:
        with pytest.raises(TraceError, match="still on"):
            trace.compare_ranks()
        for _ in range(STEPS):
            loop.step()
    assert loop.explained()["last_rank"] is None, "nobody has compared the ranks"
    told = trace.compare_ranks()["Net"]
    assert [each.rank for each in told] == [0, 1]
    assert all(len(each.waited_s) == STEPS - 1 for each in told)
    last = loop.explained()["last_rank"]
    assert (last["rank"], last["lane"], last["of"]) == (1, "compute", STEPS - 1)
    assert last["busy_s"] > 2 * last["others_busy_s"] and last["waited_s"] > 0
    text = str(package.explain(loop.model, changes=False))
    assert "on each of 2 ranks' NVIDIA H200" in text
    lines = text.partition("\nthe slowest rank\n")[2].splitlines()
    assert "fp32 matrix products" in lines[0] and "host1" in lines[0]
    assert any("came last in" in line for line in lines)
    _joint_trace(here, loop)
    with package.trace(loop.model) as nothing:
        pass
    assert nothing.compare_ranks() == {"Net": ()}


def _joint_trace(here: Here, loop: Loop) -> None:
    """One file has the processes of all ranks, on one clock."""
    path = here.folder / "trace.json"
    if here.rank:
        sum(torch.randn(300, 300) @ torch.randn(300, 300) for _ in range(100))  # it begins later
    with package.trace(loop.model) as trace:
        loop.step(MICRO)
    trace.save(str(path))
    assert len(trace.rank_steps["Net"]) == 2
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert len(names) == len(set(names.values())) == len(set(order.values())), names
    assert {e["pid"] for e in events} == names.keys() == order.keys()
    collectives = []
    for rank in (0, 1):
        start = f"rank {rank}: Net, measured"
        (pid,) = (pid for pid, name in names.items() if name.startswith(start))
        mine = [e for e in events if e["pid"] == pid]
        lanes = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert {"compute", "h2d", "d2h", "comm"} <= set(lanes.values())
        ops = [e for e in mine if e["ph"] == "X" and lanes[e["tid"]] == "comm"]
        collectives.append(sorted(ops, key=lambda e: e["ts"]))
    first, second = collectives
    assert [e["name"] for e in first] == [e["name"] for e in second] != []
    counts = Counter(e["name"].lstrip("0123456789").partition("@")[0] for e in first)
    # backwards take all weights from the slots; they sum gradients each: see decision 36
    assert counts == {"ALL_GATHER": LAYERS * MICRO, "REDUCE_SCATTER": LAYERS * MICRO}
    for a, b in zip(first, second, strict=True):  # over when all are in it
        assert a["ts"] <= b["ts"] + b["dur"] and b["ts"] <= a["ts"] + a["dur"], a["name"]


def rates_between_ranks(here: Here) -> None:
    """What ranks measure together where they have GPUs: the slowest rank's, in all of them."""
    replicas = init_device_mesh("cpu", (here.count, 1))
    told = functools.partial(ranks.told, here.mesh)
    gather_gb_s, start_s = ranks.interconnect(here.mesh, CPU, told, 2**22)
    sum_gb_s = ranks.network(replicas, CPU, functools.partial(ranks.told, replicas), 2**22)
    assert sum_gb_s is not None and 0.01 < sum_gb_s < 100 and 0 < gather_gb_s and 0 < start_s < 1
    assert len(set(here.all_say((gather_gb_s, start_s, sum_gb_s)))) == 1
    assert ranks.network(here.mesh, CPU, told, 2**22) is None, "no replicas"


TWO: dict[str, Check] = {"slow ranks": slow_ranks, "rates between ranks": rates_between_ranks}
