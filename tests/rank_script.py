"""What ranks do for tests: `torchrun ... -m tests.rank_script PART FOLDER cpu|cuda`.

Each rank saves what it found as `FOLDER/PART.RANK`. On `cuda` each has a GPU.
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import (
    rank_checkpoints,
    rank_explain,
    rank_loops,
    rank_refusals,
    rank_replicas,
    rank_rounding,
    rank_whole,
)
from tests.rank_cases import (
    FOUR,
    MODES_OF_FOUR,
    MORE,
    MORE_REPLICATED,
    ON_GPUS,
    REPLICATED,
    TWO,
)
from tests.rank_modes import Mode, Record, train

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that another rank never comes to
STATES = {"float": {}, "8 bits": {"state_dtype": "int8"}}


def nested(mesh: Any) -> DeviceMesh:
    """The same ranks as 2 x 2."""
    return init_device_mesh(mesh.device_type, (2, 2))


def modes(found: dict[str, Mode], mesh: Any) -> dict[str, Record]:
    """Train in each of some modes."""
    records = {}
    for name, mode in found.items():
        print(name, flush=True)
        records[name] = train(mode, nested(mesh) if name.startswith("2 x 2") else mesh)
        torch.compiler.reset()
    return records


def loops(mesh: Any, **options: Any) -> dict[str, Record]:
    """Every loop."""
    records = {}
    for name in rank_loops.LOOPS:
        print(name, flush=True)
        records[name] = rank_loops.run(name, mesh, mesh.size(), **options)
        torch.compiler.reset()
    return records


def checkpoints(mesh: Any, folder: Path, *names: str) -> dict[str, Any]:
    """Save, or load in some ways."""
    records = {}
    for states, options in STATES.items():
        at = folder / states
        at.mkdir(exist_ok=True)
        for name in names:
            print(name, states, flush=True)
            made = getattr(rank_checkpoints, name)(mesh, mesh.size(), at, **options)
            records[f"{name}, {states}"] = made
            torch.compiler.reset()
    return records


def run(part: str, mesh: Any, folder: Path) -> dict[str, Any]:
    """One part of the tests."""
    found: dict[str, Any]
    if part == "two":
        found = {"refusals": rank_refusals.run(mesh), "rounded": rank_rounding.rounded(mesh)}
        return modes(TWO, mesh) | found
    if part == "loops":
        return loops(mesh)
    if part == "four":
        pairs = nested(mesh)
        saved = {"2 x 2, saved": rank_whole.saved(pairs, folder)}
        plain = {"2 x 2, plain again": rank_whole.plain_again(pairs, "adamw")}
        rounded = {"2 x 2, rounded": rank_rounding.rounded(pairs)}
        values = {"2 x 2, values": rank_refusals.values(pairs)}
        found = modes(FOUR, mesh) | checkpoints(mesh, folder, "save")
        return found | saved | plain | rounded | values
    if part == "gpus":
        return modes(ON_GPUS, mesh)
    if part == "modes of four":
        return modes(MODES_OF_FOUR, mesh)
    if part == "replicas":
        return modes(REPLICATED, mesh) | rank_replicas.run(nested(mesh))
    if part == "more replicas":
        return modes(MORE_REPLICATED, mesh)
    if part == "explain":
        return rank_explain.run(mesh, folder)
    if part == "whole":
        return rank_whole.run(mesh, folder)
    if part == "save":
        return checkpoints(mesh, folder, "save")
    if part == "load":
        return checkpoints(mesh, folder, "load", "load_full", "load_plainly")
    if part == "compiled":
        return loops(mesh, lowering="inductor")
    assert part == "more", part
    return modes(MORE, mesh)


def main(part: str, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.save(run(part, mesh, folder), folder / f"{part}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
