"""What ranks share and leave: `save()`, checkpoints, state dicts, and plain models again."""

from __future__ import annotations

import copy
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.optim import SGD, Adam, AdamW, Optimizer

import megacompile as package
from megacompile import megacompile, unmegacompile
from megacompile.errors import CheckpointError, HostMemoryError, ModelError, OptionError
from megacompile.runtime.model.whole_states import Saving
from tests.ranks.here import (
    Check,
    Here,
    Values,
    contents,
    differing,
    error_of,
    gradients,
    same_in_all,
    whole,
)
from tests.ranks.modes import NEAR, ROUGH, muon

STEPS = 2
SHARD = 30_000  # bytes of a file: there are several
AT = ("large", "large again")
Make = Callable[[nn.Module], Optimizer]


class Rows(nn.Module):
    """Some parameters have states in 8 bits where these are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 71)
        self.layers = nn.ModuleList(nn.Linear(71, 71) for _ in range(2))
        self.last = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        loss: Tensor = (hidden * self.last - 1.0).square().mean()
        return loss


class Tied(Rows):
    """A layer under two names, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def net() -> Any:
    torch.manual_seed(0)
    return Tied()


def another() -> Any:
    """One of other values."""
    model = net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


def shared(here: Here, make: Make = adamw, model: Any = None, **options: Any) -> tuple[Any, Any]:
    """A model that ranks share, and its optimizer."""
    model = megacompile(model or net(), mesh=here.mesh, device="cpu", **options)
    return model, make(model)


def words(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (2, 5), generator=generator)


def train(model: Any, optimizer: Optimizer, first: int, rank: int) -> None:
    for step in range(first, first + STEPS):
        model(words(step, rank)).backward()
        optimizer.step()
        model.zero_grad()


# save()


def saves(here: Here) -> None:
    """Files are those that one process writes of the same values, and training goes on."""
    model, optimizer = shared(here)
    train(model, optimizer, 0, here.rank)
    sizes: dict[str, Any] = {"several": {"max_shard_size": SHARD}, "one": {}, "part": {}}
    for name, options in sizes.items():
        package.save(model.layers[1] if name == "part" else model, here.folder / name, **options)
    alone = net()
    alone.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    if here.rank == 0:
        for name, options in sizes.items():
            ours, theirs = here.folder / name, here.folder / f"{name}, alone"
            package.save(alone.layers[1] if name == "part" else alone, theirs, **options)
            a, b = ({f.name: f.read_bytes() for f in at.iterdir()} for at in (ours, theirs))
            assert a == b, name
        assert len([*(here.folder / "several").glob("*-of-*")]) > 1
        assert [f.name for f in (here.folder / "one").iterdir()] == ["model.safetensors"]
    train(model, optimizer, STEPS, here.rank)


@contextmanager
def little_disk(here: Here) -> Iterator[None]:
    """The first rank can write no large file: as with a full disk, the system says so."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD // 2, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def little_memory() -> Iterator[None]:
    """The system says that nearly nothing is free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        yield


def saves_that_fail(here: Here) -> None:
    """What one rank cannot do is an ordinary error in all, and they may go on."""
    model, optimizer = shared(here)
    last = here.count - 1
    file, target = here.folder / "a file", here.folder / "failing"
    if here.rank == 0:
        file.write_text("mine")
    dist.barrier()
    with pytest.raises(CheckpointError, match="cannot be written"):
        package.save(model, file)
    with little_disk(here), pytest.raises(CheckpointError, match="^save" if not here.rank else "0"):
        package.save(model, target, max_shard_size=SHARD)
    dist.barrier()
    assert not [*target.glob("*")], "nothing is left"
    with pytest.raises(OptionError, match="^save" if here.rank == last else f"^rank {last}: save"):
        package.save(model, target, max_shard_size=0 if here.rank == last else "5GB")
    if here.rank == last:
        model.layers[1].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match=r"layers\.1"):
        unmegacompile(model)
    train(model, optimizer, 0, here.rank)
    package.save(model, target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


def one_saves(here: Here) -> None:
    """The first rank alone asks for state dicts, in a block that all enter, as in Trainer."""
    model, optimizer = shared(here)
    train(model, optimizer, 0, here.rank)
    expected, file = contents(model, optimizer), here.folder / "by one"
    first = here.rank == 0
    with Saving([model], [optimizer], writes=first):
        if first:
            with Saving([model], [], writes=True):  # it has been gathered
                found = model.state_dict()
            torch.save((found, optimizer.state_dict()), file)
    assert "DTensor" in {type(value).__name__ for value in model.state_dict().values()}
    values, states = torch.load(file)
    assert not differing(values, {name: expected[name] for name in values})
    assert values["again.weight"].data_ptr() == values["layers.0.weight"].data_ptr()
    other, resumed = shared(here, model=another())
    other.load_state_dict(values)
    resumed.load_state_dict(states)
    train(model, optimizer, STEPS, here.rank)
    train(other, resumed, STEPS, here.rank)
    assert not differing(contents(other, resumed), contents(model, optimizer))

    def into_nothing() -> None:
        with Saving([model], [optimizer], writes=first):
            if first:
                torch.save(model.state_dict(), here.folder / "no" / "file")

    assert ("Parent directory" if first else "in saving Tied") in error_of(into_nothing, Exception)
    with pytest.raises(HostMemoryError), little_memory():
        with Saving([model], [], writes=first):
            pass


# Plain again.

MADE: dict[str, tuple[Make, dict[str, Any]]] = {
    "amsgrad": (lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True), {}),
    "8 bits": (adamw, {"state_dtype": "int8"}),
    "adamw": (adamw, {}),
    "sgd": (lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9), {}),
    "muon": (muon, {}),
    "resident": (adamw, {"resident": "all"}),
}


def plain_again(name: str) -> Check:
    """Train with ranks, be plain, and train on: alone, and shared again."""

    def is_plain(here: Here) -> None:
        make, options = MADE[name]
        model, optimizer = shared(here, make, **options)
        idle = make(model)  # it never steps
        train(model, optimizer, 0, here.rank)
        model(words(STEPS, here.rank)).backward()
        before = contents(model, optimizer) | gradients(model)
        assert unmegacompile(model) is model
        now = contents(model, optimizer) | gradients(model)
        assert not differing(now, before)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert model.again is model.layers[0]
        ours = {id(p) for p in model.parameters()}
        for each in (optimizer, idle):
            assert {id(p) for g in each.param_groups for p in g["params"]} <= ours
        always = net()
        always.load_state_dict(model.state_dict())
        for param, theirs in zip(always.parameters(), model.parameters(), strict=True):
            param.grad = theirs.grad.clone()
        stepping = make(always)
        stepping.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for plain, each in ((model, optimizer), (always, stepping)):
            each.step()
            plain.zero_grad()
            train(plain, each, STEPS + 1, 0)  # plain: every rank has the same rows
        assert not differing(contents(model, optimizer), contents(always, stepping))
        megacompile(model, mesh=here.mesh, device="cpu", **options)
        train(model, optimizer, 3 * STEPS, here.rank)
        same_in_all(here, contents(model, optimizer))

    return is_plain


def states_that_cannot_be_whole(here: Here) -> None:
    """An optimizer that divides states in a way of its own; and too little memory."""
    model, optimizer = shared(here)
    train(model, optimizer, 0, here.rank)
    optimizer.state[model.layers[1].weight]["mine"] = torch.zeros(3, 71)
    with pytest.raises(OptionError, match="'mine'"):
        unmegacompile(model)
    train(model, optimizer, STEPS, here.rank)  # nothing has changed
    del optimizer.state[model.layers[1].weight]["mine"]
    with pytest.raises(HostMemoryError), little_memory():
        unmegacompile(model)
    unmegacompile(model)
    train(model, optimizer, STEPS, here.rank)


# torch.distributed.checkpoint

FULL = dcp_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
STATES: dict[str, dict[str, Any]] = {"float": {}, "8 bits": {"state_dtype": "int8"}}
dcp: Any = checkpoint  # which does not name what it exports


def stored(states: str) -> Check:
    """Train, save everything in every way, and train on."""

    def stores(here: Here) -> None:
        at = here.folder / states
        model, optimizer = shared(here, **STATES[states])
        train(model, optimizer, 0, here.rank)
        dcp.save(_states(model, optimizer), checkpoint_id=at / "dcp")
        full = copy.deepcopy(_states(model, optimizer, options=FULL))  # it has steps of the states
        then = contents(model, optimizer)
        train(model, optimizer, STEPS, 0)
        later = contents(model, optimizer)
        if here.rank == 0:
            torch.save((full, then, later), at / "full")
        dist.barrier()

    return stores


def loaded(states: str) -> Check:
    """Load what others have stored, as they were or whole, and train on."""

    def loads(here: Here) -> None:
        at, options = here.folder / states, STATES[states]
        full, then, later = torch.load(at / "full")
        mine: Any = None
        for way in ("dcp", "full", "plainly"):
            model, optimizer = shared(here, model=another(), **options)
            if way == "dcp":
                found = _states(model, optimizer)
                dcp.load(found, checkpoint_id=at / "dcp")
                _set(model, optimizer, found)
            elif way == "full":
                _set(model, optimizer, full, options=FULL)
            else:  # state dicts of this rank's own, of the model before
                model.load_state_dict(mine[0])
                optimizer.load_state_dict(mine[1])
            assert not differing(contents(model, optimizer), then), way
            mine = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, STEPS, 0)
            near = ROUGH if states == "8 bits" else NEAR  # of other numbers of ranks
            assert not differing(contents(model, optimizer), later, near), way

    return loads


def _states(model: nn.Module, optimizer: Optimizer, **options: Any) -> dict[str, Any]:
    of_optimizer = dcp_states.get_optimizer_state_dict(model, optimizer, **options)
    return {
        "model": dcp_states.get_model_state_dict(model, **options),
        "optimizer": of_optimizer,
    }


def _set(model: nn.Module, optimizer: Optimizer, found: dict[str, Any], **options: Any) -> None:
    dcp_states.set_model_state_dict(model, found["model"], **options)
    dcp_states.set_optimizer_state_dict(model, optimizer, found["optimizer"], **options)


# checkpoint=


class Large(nn.Module):
    """Some 60 MB: layers between an embedding and the head that is tied to it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8191, 512)  # rows of which two ranks have unequal parts
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(40))
        self.head = nn.Linear(512, 8191, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.arange(5.0))


def memory_bytes(what: str) -> int:
    """What this process takes (VmRSS), or the most that it has taken (VmHWM)."""
    (line,) = re.findall(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(line) * 1024


@contextmanager
def at_most(size_bytes: float) -> Iterator[None]:
    """The block takes no more memory than this."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory_bytes("VmRSS")
    yield
    took = memory_bytes("VmHWM") - before
    assert took < size_bytes, (took, size_bytes)


def rows_of_a_checkpoint(here: Here) -> None:
    """Of a model on meta each rank reads its rows, and the host holds one model; when they save
    it, it holds a tensor more, not another one."""
    torch.manual_seed(0)
    plain = Large()
    size = sum(param.nbytes for param in plain.parameters())
    if here.rank == 0:
        package.save(plain, here.folder / "large", max_shard_size="20MB")
        assert len([*(here.folder / "large").glob("*.safetensors")]) > 2
    dist.barrier()
    megacompile(nn.Linear(4, 4), mesh=here.mesh, device="cpu")  # what is imported late
    with torch.device("meta"):
        model = Large()
    with at_most(0.6 * size):
        megacompile(model, mesh=here.mesh, device="cpu", checkpoint=here.folder / "large")
    with at_most(0.85 * size):
        package.save(model, here.folder / "large again", max_shard_size="20MB")
    assert model.head.weight is model.embedding.weight
    assert {type(param).__name__ for param in model.parameters()} == {"DTensor"}
    ours: Values = {name: whole(value) for name, value in model.state_dict().items()}
    assert not differing(ours, plain.state_dict())
    if here.rank == 0:
        a, b = ({f.name: f.read_bytes() for f in (here.folder / at).iterdir()} for at in AT)
        assert a == b


TWO: dict[str, Check] = {
    "rows of a checkpoint": rows_of_a_checkpoint,
    "save()": saves,
    "save() that fails": saves_that_fail,
    "one rank saves": one_saves,
    "plain again, amsgrad": plain_again("amsgrad"),
    "plain again, 8 bits": plain_again("8 bits"),
    "states that cannot be whole": states_that_cannot_be_whole,
}
MORE: dict[str, Check] = {f"plain again, {name}": plain_again(name) for name in [*MADE][2:]}
STORE: dict[str, Check] = {f"stored, {states}": stored(states) for states in STATES}
LOAD: dict[str, Check] = {f"loaded, {states}": loaded(states) for states in STATES}
FOUR: dict[str, Check] = {
    "save(), 2 x 2": lambda here: saves(here.pairs),
    "plain again, 2 x 2": lambda here: plain_again("adamw")(here.pairs),
}
