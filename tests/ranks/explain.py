"""Ranks whose work is not the same, and what traces and `explain` say of them.

Rates that differ: `tests/unit/test_agreement.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import megacompile as package
from tests.ranks.here import Check, Here
from tests.zoo import Tower

LAYERS = 3
STEPS = 4
MICRO = 2  # batches of the step of the last trace
WIDTH, ROWS, MORE = 256, 64, 256  # the last rank has so many times the rows


class Loop:
    def __init__(self, here: Here) -> None:
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.model: Any = Tower(layers, lambda layer, x: torch.relu(layer(x)))
        package.megacompile(self.model, mesh=here.mesh, device="cpu", progress=False)
        self.data = torch.randn(ROWS * (MORE if here.rank else 1), WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, micro: int = 1) -> None:
        for _ in range(micro):
            self.model(self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def explained(self) -> dict[str, Any]:
        return package.explain(self.model, changes=False).to_dict()


def slow_ranks(here: Here) -> None:
    """Who came last in traced steps."""
    loop = Loop(here)
    loop.step()
    assert loop.explained()["ranks"] == 2 and "interconnect" in loop.explained()["bounds"]
    with package.trace(loop.model) as trace:
        for _ in range(STEPS):
            loop.step()
    assert loop.explained()["last_rank"] is None, "nobody has compared the ranks"
    trace.save(str(here.folder / "steps.json"))
    told = trace.rank_steps["Tower"]
    assert [each.rank for each in told] == [0, 1]
    assert told[0].waited_s > told[1].waited_s
    last = loop.explained()["last_rank"]
    assert (last["rank"], last["lane"]) == (1, "compute")
    assert last["busy_s"] > 2 * last["others_busy_s"] and last["waited_s"] > 0
    joint_trace(here, loop)
    with package.trace(loop.model) as nothing:
        pass
    nothing.save(str(here.folder / "nothing.json"))
    assert nothing.rank_steps == {"Tower": ()}


def joint_trace(here: Here, loop: Loop) -> None:
    """One file has the processes of all ranks, on one clock."""
    path = here.folder / "trace.json"
    if here.rank:
        sum(torch.randn(300, 300) @ torch.randn(300, 300) for _ in range(100))  # it begins later
    with package.trace(loop.model) as trace:
        loop.step(MICRO)
    trace.save(str(path))
    assert len(trace.rank_steps["Tower"]) == 2
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == len(set(names.values())), names
    assert {e["pid"] for e in events} == names.keys()
    collectives = []
    for rank in (0, 1):
        start = f"rank {rank}: Tower, measured"
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


def trace_that_fails(here: Here) -> None:
    """The file that all ranks' traces go to cannot be written: an error in all, who may go on."""
    loop = Loop(here)
    with package.trace(loop.model) as trace:
        loop.step()
    with pytest.raises(Exception, match="trace"):
        trace.save(str(here.folder / "is not there" / "trace.json"))
    trace.save(str(here.folder / "trace of two.json"))
    assert (here.folder / "trace of two.json").exists()


TWO: dict[str, Check] = {"slow ranks": slow_ranks, "a trace that fails": trace_that_fails}
