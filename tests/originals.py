"""Schedules to break: the passes make them for random models, or lines of stages, and plans."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import strategies as st

from megacompile.ir.schedule import Schedule
from tests import nets
from tests.capturing import capture, differentiated
from tests.draws import examples
from tests.nets import Choice, Net
from tests.planned import passed
from tests.planned import planned as planned_line
from tests.subject import plain_refuses


def planned(count: int, seed: int) -> list[Schedule]:
    """`count` schedules that the passes make for random models and plans; none of them is run.

    Their code is not compiled, so they have what is only made with Inductor, too: norms, and
    updates on the device.
    """
    found: list[Schedule] = []

    def one(net: Net, chosen: int) -> None:
        if len(found) >= count or plain_refuses(net, Choice()):
            return
        rng = random.Random(chosen)
        inputs: dict[str, Any] = {**nets.data(net, 0)}
        graphs = differentiated(capture(nets.build(net), **inputs))
        for _ in range(2):  # tracing takes most of the time
            found.append(passed(graphs, **any_plan(rng, len(graphs.buckets))))

    examples(one, nets.nets(), st.integers(0, 2**30), count=2 * count, seed=seed, shrink=False)
    return found


def lined(count: int, seed: int) -> list[Schedule]:
    """`count` schedules that the passes make of random lines and plans; nothing is captured."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        stages = rng.randint(2, 4)
        stubs: dict[str, Any] = {
            "reads": {stages - 1: f"{stages - 1} 0"} if rng.random() < 0.3 else {},
            "random": _some(rng, stages, 0.3),
            "changes": _some(rng, stages, 0.2),
            "saved": rng.choice((1, 2)),
            "helps": rng.random() < 0.3,
        }
        line = " ".join(f"{i}F" for i in range(stages))
        found.append(planned_line(line, **stubs, **any_plan(rng, stages)))
    return found


def _some(rng: random.Random, count: int, share: float) -> frozenset[int]:
    return frozenset(i for i in range(count) if rng.random() < share)


def any_plan(rng: random.Random, buckets: int) -> dict[str, Any]:
    """Options of the passes, for a model of so many buckets."""
    update, lookahead, offload = rng.random() < 0.3, rng.randint(1, 3), rng.random() < 0.4
    resident = _some(rng, buckets, 0.25)
    return {
        "accumulate": rng.random() < 0.35,
        "keep_last": rng.random() < 0.7,
        "keep": rng.randint(0, buckets),
        "reuse": rng.random() < 0.4,
        "lookahead": lookahead,
        "slots": lookahead + 1 + rng.randint(0, 2),
        "update": update,
        "compute_dtype": torch.bfloat16 if update and rng.random() < 0.3 else None,  # masters
        "device_update": 0.0 if update else rng.choice((0.0, 0.3, 0.6, 1.0)),
        "resident": resident,
        "on_disk": _some(rng, buckets, 0.3) - resident,
        "state_delay": rng.choice((1, 1, 2)),
        "rerun": rng.choice((0, 0, 1, 9)),
        "activations": "offload" if offload else "auto",
        "offload": buckets if offload else 0,
        "saved_on_disk": buckets if offload and rng.random() < 0.7 else 0,
        "saved_on_host": rng.choice((0, 0, 2, 3)),
        "inductor": rng.random() < 0.5,
    }
