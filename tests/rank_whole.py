"""What ranks share and leave: `save()`, and plain models again."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import megacompile as package
from megacompile import megacompile, notices, unmegacompile
from megacompile.runtime.checkpoint import writer
from megacompile.runtime.device import ranks
from megacompile.runtime.model import gathering, whole_states
from megacompile.runtime.model.whole_states import Saving
from tests.rank_cases import lion, muon
from tests.rank_checkpoints import Rows
from tests.rank_modes import contents, whole
from tests.rank_refusals import said_by

STEPS = 2
SHARD = 30_000  # bytes of a file: there are several
MADE: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any]]] = {
    "adamw": (lambda m: AdamW(m.parameters(), lr=0.01), {}),
    "amsgrad": (lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True), {}),
    "sgd": (lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9), {}),
    "lion": (lion, {}),
    "muon": (muon, {}),
    "8 bits": (lambda m: AdamW(m.parameters(), lr=0.01), {"state_dtype": "int8"}),
    "resident": (lambda m: AdamW(m.parameters(), lr=0.01), {"resident": "all"}),
}


class Tied(Rows):
    """A layer under two names, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def net() -> Any:
    torch.manual_seed(0)
    return Tied()


def words(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (2, 5), generator=generator)


def train(model: Any, optimizer: Optimizer, first: int, rank: int) -> None:
    for step in range(first, first + STEPS):
        model(words(step, rank)).backward()
        optimizer.step()
        model.zero_grad()


def saved(mesh: Any, folder: Path) -> dict[str, Any]:
    """Save a trained model, and one that trains on; what its tensors are."""
    model = megacompile(net(), mesh=mesh, device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0, dist.get_rank())
    most = Most()
    package.save(model, folder / "several", max_shard_size=SHARD)
    most.end()
    package.save(model, folder / "one")
    package.save(model.layers[1], folder / "part")
    there = sorted(path.name for path in (folder / "one").iterdir())
    tensors = {name: whole(p).clone() for name, p in model.state_dict().items()}
    train(model, optimizer, STEPS, dist.get_rank())
    return {"tensors": tensors, "there": there, "alive": most.alive, "gathered": most.gathered}


def saved_by_one(mesh: Any, folder: Path) -> dict[str, Any]:
    """The first rank alone asks for state dicts, in a block that all enter, and saves them. What
    resumes from them, and what trains on, in each rank."""
    rank, file = dist.get_rank(), folder / "by one"
    model = megacompile(net(), mesh=mesh, device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0, rank)
    expected = contents(model, optimizer)
    with Saving([model], [optimizer], writes=rank == 0):
        if rank == 0:
            with Saving([model], [], writes=True):  # it has been gathered
                found = model.state_dict()
            torch.save((found, optimizer.state_dict()), file)
    kinds = {type(value) for value in model.state_dict().values()}
    values, states = torch.load(file)
    other = net().requires_grad_(True)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    megacompile(other, mesh=mesh, device="cpu").load_state_dict(values)
    resumed = AdamW(other.parameters(), lr=0.01)
    resumed.load_state_dict(states)
    for each, stepping in ((model, optimizer), (other, resumed)):
        train(each, stepping, STEPS, rank)
    return {
        "saved": {name: value for name, value in values.items() if name in expected["params"]},
        "tied": values["again.weight"].data_ptr() == values["layers.0.weight"].data_ptr(),
        "expected": expected["params"],
        "is shared again": [kind.__name__ for kind in kinds],
        "on": contents(model, optimizer),
        "resumed": contents(other, resumed),
        "told": _saves_into_nothing(model, optimizer, folder / "no" / "file"),
        "memory": said_by(lambda: _saves_without_memory(model)),
    }


def heard(mesh: Any) -> dict[str, Any]:
    """What this rank says of a first step: warnings, and what it shows."""
    shown = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(shown):
        warnings.simplefilter("always")
        model = megacompile(net(), mesh=mesh, device="cpu", progress=True)
        model.compile()
        notices.warn("its memory", notices.Whose.RANK)
        train(model, AdamW(model.parameters()), 0, dist.get_rank())
    said = [str(each.message) for each in caught if each.category is UserWarning]
    return {"warned": said, "shown": shown.getvalue()}


def _saves_into_nothing(model: nn.Module, optimizer: Optimizer, file: Path) -> str:
    first = dist.get_rank() == 0
    try:
        with Saving([model], [optimizer], writes=first):
            if first:
                torch.save(model.state_dict(), file)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _saves_without_memory(model: nn.Module) -> None:
    with mock.patch.object(whole_states, "available_bytes", lambda: 1000):
        with Saving([model], [], writes=dist.get_rank() == 0):
            pass


class Most:
    """How many whole tensors are alive when the next one is gathered."""

    def __init__(self) -> None:
        self.alive = self.gathered = 0
        stock = ranks.whole
        seen: list[weakref.ref[Tensor]] = []

        def counted(like: Tensor, part: Tensor) -> Tensor:
            self.alive = max(self.alive, sum(each() is not None for each in seen))
            self.gathered += 1
            made = stock(like, part)
            seen.append(weakref.ref(made))
            return made

        self._patch = mock.patch.object(ranks, "whole", counted)
        self._patch.start()

    def end(self) -> None:
        self._patch.stop()


def failing(mesh: Any, folder: Path) -> dict[str, Any]:
    """What this rank was told where the first one, or the last one, cannot go on."""
    model = megacompile(net(), mesh=mesh, device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.01)
    rank, last = dist.get_rank(), mesh.size() - 1
    target = folder / "failing"
    said = {"a file": said_by(lambda: package.save(model, _file(folder)))}
    stock = writer.SafetensorsFile.write

    def full(self: Any, name: str, tensor: Tensor) -> None:
        if "layers.1" in name:
            raise OSError(28, "No space left on device")
        stock(self, name, tensor)

    writer.SafetensorsFile.write = full  # type: ignore[method-assign]
    said["a full disk"] = said_by(lambda: package.save(model, target, max_shard_size=SHARD))
    writer.SafetensorsFile.write = stock  # type: ignore[method-assign]
    dist.barrier()
    said["left"] = str([path.name for path in target.iterdir()])
    sizes = "5GB" if rank < last else 0
    said["a size"] = said_by(lambda: package.save(model, target, max_shard_size=sizes))
    if rank == last:
        model.layers[1].weight.register_hook(lambda gradient: gradient)
    said["a hook"] = said_by(lambda: unmegacompile(model))
    train(model, optimizer, 0, rank)
    package.save(model, target)
    said["in the end"] = str(sorted(path.name for path in target.iterdir()))
    return said


def _file(folder: Path) -> Path:
    file = folder / "file"
    file.write_text("mine")
    return file


def plain_again(mesh: Any, name: str) -> dict[str, Any]:
    """Train with ranks, be plain, and train on: alone, and shared again."""
    make, options = MADE[name]
    rank = dist.get_rank()
    model = megacompile(net(), mesh=mesh, device="cpu", **options)
    optimizer, idle = make(model), make(model)  # idle: it never steps
    train(model, optimizer, 0, rank)
    model(words(STEPS, rank)).backward()
    shared = contents(model, optimizer) | {"gradients": gradients(model)}
    assert unmegacompile(model) is model
    now = contents(model, optimizer) | {"gradients": gradients(model)}
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model.again is model.layers[0] and not hasattr(model, "_is_accelerate_prepared")
    ours = {id(p) for p in model.parameters()}
    assert all(
        id(p) in ours for o in (optimizer, idle) for g in o.param_groups for p in g["params"]
    )
    alone = another(make, now, optimizer)
    for each, stepping in ((model, optimizer), alone):
        stepping.step()
        each.zero_grad()
        train(each, stepping, STEPS + 1, 0)  # plain: every rank has the same rows
    plain, expected = contents(model, optimizer), contents(*alone)
    megacompile(model, mesh=mesh, device="cpu", **options)
    train(model, optimizer, 3 * STEPS, rank)
    again = contents(model, optimizer)
    return {"shared": shared, "now": now, "plain": plain, "expected": expected, "again": again}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones, by name."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: whole(g).clone() for name, g in found.items() if g is not None}


def another(
    make: Callable[[nn.Module], Optimizer], now: dict[str, Any], optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """A model that was always plain, with the same values."""
    model = net()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(now["params"][name])
            param.grad = now["gradients"][name].clone()
    made = make(model)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it takes them, else
    return model, made


def refused_states(mesh: Any) -> dict[str, str]:
    """An optimizer that divides states in a way of its own."""
    model = megacompile(net(), mesh=mesh, device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0, dist.get_rank())
    optimizer.state[model.layers[1].weight]["mine"] = torch.zeros(3, 71)
    said = said_by(lambda: unmegacompile(model))
    train(model, optimizer, STEPS, dist.get_rank())  # nothing has changed
    del optimizer.state[model.layers[1].weight]["mine"]
    with mock.patch.object(gathering, "available_bytes", lambda: 1000):
        memory = said_by(lambda: unmegacompile(model))
    unmegacompile(model)
    return {"states": said, "memory": memory}


def run(mesh: Any, folder: Path) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"saved": saved(mesh, folder), "failing": failing(mesh, folder)}
    found["refused"] = refused_states(mesh)
    found["heard"] = heard(mesh)
    found["by one"] = saved_by_one(mesh, folder)
    for name in MADE:
        found[name] = plain_again(mesh, name)
        torch.compiler.reset()
    return found
