"""Ranks that copy whole buckets, from memory that all of them map, against ranks that gather.

In every bit, though one rank is late with what the others copy, or with its own copies.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megacompile as package
from megacompile import megacompile, unmegacompile
from megacompile.ir import ops
from tests import inside
from tests.ranks import loops, modes, states
from tests.ranks.here import Check, Here, Values, contents, differing
from tests.ranks.loops import Loop
from tests.ranks.nets import Words


def is_whole(model: nn.Module) -> list[bool]:
    """Of each bucket, whether ranks copy it whole."""
    return [bucket.shared_weights is not None for bucket in inside.buckets(model).values()]


def work() -> None:
    """What takes a while."""
    for _ in range(8):
        torch.randn(500, 500) @ torch.randn(500, 500)


def late_updates(loop: Loop) -> None:
    """The last rank updates its rows late, in the background."""
    adam: Any = importlib.import_module("torch.optim.adam")
    stock = adam.adam

    def slow(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            work()
        return stock(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "adam", slow)
        for step in range(3):
            loop.train(step)
            loop.update()


def late_copies(loop: Loop) -> None:
    """The last rank has more to compute before its last copies; the others write parameters as soon
    as they have their loss."""
    for step in range(3):
        rows = loop.batch(step)
        more = rows.repeat(2000, 1) if dist.get_rank() == dist.get_world_size() - 1 else rows
        with torch.no_grad():
            loss = loop.model(more)
            for param in loop.model.parameters():
                param.mul_(0.9)
        loop.note(loss, of_rank=True)
        loop.train(step)
        with torch.no_grad():
            for param in loop.model.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None


def loads_and_forks(loop: Loop) -> None:
    """Parameters and states come from elsewhere in the middle; a child of a fork writes into its
    own memory."""
    loop.train(0)
    loop.update()
    model = {name: p.detach().clone() for name, p in loop.model.state_dict().items()}
    of_optimizer = loop.optimizer.state_dict()
    loop.train(1)
    loop.update()
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(of_optimizer)
    pid = os.fork()
    if pid == 0:
        with torch.no_grad():
            for bucket in inside.buckets(loop.model).values():
                bucket.flat.fill_(1)
        os._exit(0)
    os.waitpid(pid, 0)
    loop.train(2)
    loop.update()


def disturbed(body: Callable[[Loop], None], **options: Any) -> Check:
    """A loop gives what it gives with gathers."""

    def equal_in_every_bit(here: Here) -> None:
        records = []
        for whole in (False, True):
            loop = Loop(Words, here.mesh, here.count, whole_buckets=whole, **options)
            assert all(is_whole(loop.model)) is whole
            body(loop)
            records.append(loop.record())
            torch.compiler.reset()
        wrong = differing(records[1], records[0])
        assert not wrong, "\n".join(wrong)

    return equal_in_every_bit


def each_row_is_there_once(here: Here) -> None:
    """A rank's budget has its own rows; the file is gone when the model is plain again."""

    def files() -> int:
        gc.collect()
        links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        opened = sum("memfd:megacompile" in os.readlink(path) for path in links)
        return opened + Path("/proc/self/maps").read_text().count("memfd:megacompile")

    before = files()
    model: Any = megacompile(Words().double(), mesh=here.mesh, device="cpu", whole_buckets=True)
    mine = sum(bucket.layout.size_bytes for bucket in inside.buckets(model).values())
    assert files() > before
    assert inside.machine(model).host_budget.held_bytes == mine
    weight = model.layers[0][0].weight
    (bucket,) = (b for b in inside.buckets(model).values() if any(p is weight for p in b.params))
    whole = weight.full_tensor()
    dist.barrier()
    places = range(0, bucket.flat.numel() - whole.nbytes + 1, 256)
    assert any(
        bucket.flat[at : at + whole.nbytes].view(whole.dtype).equal(whole.flatten())
        for at in places
    ), "the rows of all ranks, as they lie in a slot"
    del bucket, weight, whole
    unmegacompile(model)
    del model
    assert files() == before


def planned(here: Here, resident: int = 3000) -> None:
    """Whole copies of what a plan has left on the host: buckets move there first."""
    records: list[Values] = []
    for whole in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"gpu_memory": "200MiB", "resident": resident}
        model: Any = Words()
        megacompile(model, mesh=here.mesh, device="cpu", whole_buckets=whole, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            model(modes.batch(model, step, here.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        records.append(contents(model, optimizer))
        torch.compiler.reset()
    wrong = differing(records[1], records[0])
    assert not wrong, "\n".join(wrong)
    (schedule,) = package.schedules(model)
    actions = ops.actions(schedule.forward)
    assert is_whole(model) == [not resident, True, True, True]
    assert ("GATHER" in actions) == bool(resident) and "PREFETCH_WHOLE" in actions


def from_a_checkpoint(here: Here) -> None:
    """Ranks read the rows of a checkpoint into memory that all of them map."""
    records: list[Values] = []
    folder = here.folder / "words"
    package.save(megacompile(Words(), mesh=here.mesh, device="cpu"), folder)
    for whole in (False, True):
        with torch.device("meta"):
            model: Any = Words()
        options: dict[str, Any] = {"checkpoint": folder, "whole_buckets": whole}
        megacompile(model, mesh=here.mesh, device="cpu", **options)
        assert all(is_whole(model)) is whole
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            model(modes.batch(model, step, here.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        records.append(contents(model, optimizer))
        torch.compiler.reset()
    wrong = differing(records[1], records[0])
    assert not wrong, "\n".join(wrong)


def stored_and_loaded(here: Here) -> None:
    """torch.distributed.checkpoint, of parameters in such memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(states.STATES, "whole", {"whole_buckets": True})
        states.stored("whole")(here)
        states.loaded("whole")(here)


TWO: dict[str, Check] = {
    "late updates": disturbed(late_updates),
    "late copies": disturbed(late_copies, lookahead=1),
    "each row is there once": each_row_is_there_once,
    "planned": planned,
}
MORE: dict[str, Check] = {
    "loads and forks": disturbed(loads_and_forks),
    "planned, all": lambda here: planned(here, 0),
    "from a checkpoint": from_a_checkpoint,
    "stored and loaded": stored_and_loaded,
    **loops.WHOLE,
    **{f"whole, {name}": modes.gathered_and_whole(mode) for name, mode in modes.WHOLE.items()},
}
FOUR: dict[str, Check] = {
    "late updates, 2 x 2": lambda here: disturbed(late_updates)(here.pairs),
    "whole, 2 x 2": lambda here: modes.gathered_and_whole(modes.EXACT)(here.pairs),
}
