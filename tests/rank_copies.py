"""Ranks that copy whole buckets: `torchrun ... -m tests.rank_copies PART FOLDER`.

Everything is done twice, with gathers and with whole copies; what differs in any bit is saved, as
`FOLDER/PART.RANK`.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megacompile as package
from megacompile import megacompile, unmegacompile
from megacompile.ir import ops
from megacompile.runtime.device import shared_buffers
from megacompile.runtime.device.agreement import Agreement
from megacompile.runtime.model.lookup import streamed_model
from megacompile.runtime.ops.collectives import CollectiveOps
from megacompile.runtime.updates.update import BucketUpdate
from tests import rank_checkpoints, rank_loops
from tests.rank_cases import FOUR, MORE, TWO
from tests.rank_loops import Loop
from tests.rank_modes import Mode, Record, contents, differences, train
from tests.rank_nets import Words
from tests.rank_refusals import said_by

EVERY = TWO | MORE
MODES = (
    "exact",
    "in the backward",
    "8 bits, in the backward, on a disk",
    "adapters",
    "odd shapes, accumulating",
    "tied, in the backward",
)
LOOPS = ("penalty", "looks", "sets", "evaluates", "freezes", "breaks")
LATE_S = 0.1


def is_whole(model: Any) -> list[bool]:
    """Of each bucket, whether ranks copy it whole."""
    return [
        b.shared_weights is not None
        for b in streamed_model(model, "rank_copies").machine.buckets.values()
    ]


def modes(found: Mapping[str, Mode], mesh: Any) -> dict[str, list[str]]:
    """What differs in some modes."""
    wrong = {}
    for name, mode in found.items():
        print(name, flush=True)
        nested = init_device_mesh("cpu", (2, 2)) if name.startswith("2 x 2") else mesh
        whole = replace(mode, options={**mode.options, "whole_buckets": True})
        records = []
        for each in (mode, whole):
            records.append(train(each, nested))
            torch.compiler.reset()
        wrong[name] = differences(records[1], records[0], 0.0)
    return wrong


def loops(mesh: Any) -> dict[str, list[str]]:
    """What differs in loops."""
    wrong = {}
    for name in LOOPS:
        print(name, flush=True)
        records = []
        for options in ({}, {"whole_buckets": True}):
            records.append(rank_loops.run(name, mesh, mesh.size(), **options))
            torch.compiler.reset()
        wrong[name] = differences(records[1], records[0], 0.0)
    return wrong


def twice(body: Callable[[Loop], None], mesh: Any, **options: Any) -> list[str]:
    """What differs in one loop. With whole copies the ranks do not meet in the store before a
    graph, as on GPUs."""
    records: list[Record] = []
    for whole in (False, True):
        loop = Loop(Words, mesh, mesh.size(), whole_buckets=whole, **options)
        assert all(is_whole(loop.model)) is whole or options
        meet = mock.patch.object(Agreement, "_meet", lambda *_: None)
        with meet if whole else nullcontext():
            body(loop)
        records.append(loop.record())
        torch.compiler.reset()
    return differences(records[1], records[0], 0.0)


@contextmanager
def late(owner: Any, name: str, seconds: float = LATE_S) -> Iterator[None]:
    """For its duration a method is late in the last rank."""
    stock = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return stock(*args, **kwargs)

    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(owner, name, slow) if last else nullcontext():
        yield


def late_updates(loop: Loop) -> None:
    """The last rank updates its rows late, in the background."""
    with late(BucketUpdate, "__call__"):
        for step in range(3):
            loop.train(step)
            loop.update()


def late_copies(loop: Loop) -> None:
    """The last rank copies late, and the others write parameters as soon as they have the loss."""
    with late(CollectiveOps, "prefetch_whole", 0.05):
        for step in range(3):
            with torch.no_grad():
                loss = loop.model(loop.batch(step))
                for param in loop.model.parameters():
                    param.mul_(0.9)
            loop.note(loss, of_rank=True)
            loop.train(step)
            with torch.no_grad():
                for param in loop.model.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None


def late_writes(loop: Loop) -> None:
    """The last rank writes its rows late, in the user's code."""
    for step in range(3):
        loop.train(step)
        loop.update()
        if dist.get_rank():
            time.sleep(LATE_S)
        with torch.no_grad():
            loop.model.head.weight.mul_(0.9)


def loads(loop: Loop) -> None:
    """Parameters and states come from elsewhere in the middle."""
    loop.train(0)
    loop.update()
    model = {name: p.detach().clone() for name, p in loop.model.state_dict().items()}
    states = loop.optimizer.state_dict()
    loop.train(1)
    loop.update()
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(states)
    loop.train(2)
    loop.update()


def forks(loop: Loop) -> None:
    """A child of a fork writes into its own memory."""
    loop.train(0)
    loop.update()
    pid = os.fork()
    if pid == 0:
        with torch.no_grad():
            for bucket in streamed_model(loop.model, "rank_copies").machine.buckets.values():
                bucket.flat.fill_(1)
        os._exit(0)
    os.waitpid(pid, 0)
    loop.train(1)
    loop.update()


DISTURBED = {
    "late updates": late_updates,
    "late copies": late_copies,
    "late writes": late_writes,
    "loads": loads,
    "forks": forks,
}


def memory(mesh: Any) -> dict[str, Any]:
    """How often rows are there, and what is left behind."""
    gc.collect()
    before = {path.name for path in Path("/dev/shm").iterdir()}
    fds = len(os.listdir("/proc/self/fd"))
    model: Any = Words().double()
    megacompile(model, mesh=mesh, device="cpu", whole_buckets=True)
    buckets = streamed_model(model, "rank_copies").machine.buckets.values()
    held = streamed_model(model, "rank_copies").machine.host_budget.held_bytes
    mine = sum(bucket.layout.size_bytes for bucket in buckets)
    weight = model.layers[0][0].weight
    place = next(b for b in buckets if any(p is weight for p in b.params)).flat
    whole = weight.full_tensor()
    dist.barrier()
    there = any(
        bool((place[at : at + whole.nbytes].view(whole.dtype) == whole.flatten()).all())
        for at in range(0, place.numel() - whole.nbytes + 1, 256)
    )
    files = Path("/proc/self/maps").read_text().count("memfd:megacompile")
    del buckets, place, weight, whole
    unmegacompile(model)
    del model
    gc.collect()
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    return {
        "held": held,
        "mine": mine,
        "there": there,
        "files": files,
        "left": [name for name in left if not name.startswith("torch_")],
        "fds": len(os.listdir("/proc/self/fd")) - fds,
    }


def refused(mesh: Any) -> str:
    """What is said where ranks are on two hosts."""
    where = f"host {dist.get_rank()}"
    with mock.patch.object(shared_buffers, "namespace", lambda: where):
        make = functools.partial(megacompile, Words(), mesh=mesh, device="cpu")
        return said_by(functools.partial(make, whole_buckets=True))


def from_checkpoint(mesh: Any, folder: Path) -> list[str]:
    """What differs from a checkpoint whose rows ranks read into memory that all of them map."""
    records: list[Record] = []
    saved: Any = megacompile(Words(), mesh=mesh, device="cpu")
    package.save(saved, folder / "checkpoint")
    for whole in (False, True):
        with torch.device("meta"):
            model: Any = Words()
        at = folder / "checkpoint"
        megacompile(model, mesh=mesh, device="cpu", checkpoint=at, whole_buckets=whole)
        assert all(is_whole(model)) is whole
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            model(model.batch(torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        records.append({"losses": [], "norms": []} | contents(model, optimizer))
        torch.compiler.reset()
    return differences(records[1], records[0], 0.0)


def planned(mesh: Any) -> dict[str, Any]:
    """Whole copies of what a plan has left on the host: buckets move there first."""
    found = {}
    for name, options in {"some": {"resident": 3000}, "all": {"resident": 0}}.items():
        records = []
        for whole in (False, True):
            torch.manual_seed(0)
            model: Any = Words()
            given: dict[str, Any] = {"gpu_memory": "200MiB", "whole_buckets": whole, **options}
            megacompile(model, mesh=mesh, device="cpu", **given)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                model(model.batch(generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
            record: Record = {"losses": [], "norms": []}
            records.append(record | contents(model, optimizer))
            torch.compiler.reset()
        (schedule,) = streamed_model(model, "rank_copies").schedules()
        found[name] = {
            "wrong": differences(records[1], records[0], 0.0),
            "whole": is_whole(model),
            "actions": ops.actions(schedule.forward),
            "reasons": schedule.plan.reasons,
        }
    return found


def run(part: str, mesh: Any, folder: Path) -> dict[str, Any]:
    """One part of the tests."""
    if part == "two":
        return {
            "modes": modes({name: EVERY[name] for name in MODES}, mesh),
            "disturbed": {name: twice(body, mesh) for name, body in DISTURBED.items()},
            "memory": memory(mesh),
            "refused": refused(mesh),
            "planned": planned(mesh),
        }
    if part == "more":
        return {"modes": modes({n: m for n, m in EVERY.items() if n not in MODES}, mesh)}
    if part == "loops":
        checkpoint = from_checkpoint(mesh, folder)
        saved = rank_checkpoints.save(mesh, mesh.size(), folder, whole_buckets=True)
        loaded = rank_checkpoints.load(mesh, mesh.size(), folder, whole_buckets=True)
        again = differences(loaded["loaded"], saved["saved"], 0.0)
        again += differences(loaded["trained"], saved["trained"], 0.0)
        return {"loops": loops(mesh), "checkpoint": checkpoint, "saved and loaded": again}
    assert part == "four", part
    nested = init_device_mesh("cpu", (2, 2))
    return {"modes": modes(FOUR, mesh), "late": twice(late_updates, nested)}


def main(part: str, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.save(run(part, mesh, folder), folder / f"{part}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
