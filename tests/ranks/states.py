"""What ranks share and leave: `save()`, checkpoints, state dicts, and plain models again."""

from __future__ import annotations

import copy
import re
import resource
import sys
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
from torch.optim import AdamW, Optimizer

import megacompile as package
from megacompile import megacompile, unmegacompile
from megacompile.errors import CheckpointError, HostMemoryError, ModelError, OptionError
from tests.ranks.here import Check, Here, Values, contents, differing, whole
from tests.zoo import Language

STEPS = 2
SHARD = 30_000  # bytes of a file: there are several
Make = Callable[[nn.Module], Optimizer]


class Tied(nn.Module):
    """A layer under two names, a buffer that is not saved, small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 71)
        self.layers = nn.ModuleList(nn.Linear(71, 71) for _ in range(2))
        self.last = nn.Parameter(torch.ones(1))
        self.again = self.layers[0]
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden * self.last - 1.0).square().mean()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def net() -> Any:
    torch.manual_seed(0)
    return Tied()


def another() -> Any:
    model = net()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


def shared(here: Here, make: Make = adamw, model: Any = None, **options: Any) -> tuple[Any, Any]:
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


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def saves(here: Here) -> None:
    """Files are those that one process writes of the same values, and training goes on."""
    model, optimizer = shared(here)
    train(model, optimizer, 0, here.rank)
    alone = net()
    alone.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    sizes: dict[str, Any] = {"several": {"max_shard_size": SHARD}, "one": {}, "part": {}}
    for name, options in sizes.items():
        of = [each.layers[1] if name == "part" else each for each in (model, alone)]
        package.save(of[0], here.folder / name, **options)
        if here.rank == 0:
            package.save(of[1], here.folder / f"{name}, alone", **options)
            found = files(here.folder / name)
            assert found == files(here.folder / f"{name}, alone"), name
            assert (len(found) > 2) == (name == "several")
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
    with pytest.raises(ModelError, match="share"):
        unmegacompile(model)
    train(model, optimizer, 0, here.rank)
    package.save(model, target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


class Accelerator:
    """It writes in the first rank alone, as that of Accelerate does."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
        self._models, self._optimizers = [model], [optimizer]
        self.is_main_process = rank == 0
        self.project_configuration = SimpleNamespace(save_on_each_node=False)

    def save_state(self, path: Path) -> None:
        if self.is_main_process:
            found = self._models[0].state_dict(), self._optimizers[0].state_dict()
            torch.save(found, path)

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()


def one_saves(here: Here) -> None:
    """The first rank alone asks for state dicts, in a method that all call."""
    loop: Any = SimpleNamespace(Accelerator=Accelerator)
    model, optimizer = shared(here)
    with pytest.MonkeyPatch.context() as patch:  # it is imported late
        patch.setitem(sys.modules, "accelerate.accelerator", loop)
        train(model, optimizer, 0, here.rank)
    expected, file, first = contents(model, optimizer), here.folder / "by one", here.rank == 0
    accelerator = Accelerator(model, optimizer, here.rank)
    accelerator.save_state(file)
    assert "DTensor" in {type(value).__name__ for value in model.state_dict().values()}
    assert bool(accelerator.get_state_dict(model)) == first
    dist.barrier()
    values, states = torch.load(file)
    assert not differing(values, {name: expected[name] for name in values})
    assert values["again.weight"].data_ptr() == values["layers.0.weight"].data_ptr()
    other, resumed = shared(here, model=another())
    other.load_state_dict(values)
    resumed.load_state_dict(states)
    train(model, optimizer, STEPS, here.rank)
    train(other, resumed, STEPS, here.rank)
    assert not differing(contents(other, resumed), contents(model, optimizer))
    with pytest.raises(Exception, match="Parent directory" if first else "in saving Tied"):
        accelerator.save_state(here.folder / "no" / "file")
    with pytest.raises(HostMemoryError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        accelerator.save_state(file)


# torch.distributed.checkpoint

FULL = dcp_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
STATES: dict[str, dict[str, Any]] = {"float": {}, "8 bits": {"state_dtype": "int8"}}
dcp: Any = checkpoint  # which does not name what it exports


def checkpointed(states: str) -> Check:
    """Load what was saved, as it was or whole, and train on."""

    def loads(here: Here) -> None:
        at, options = here.folder / f"dcp, {states}", STATES[states]
        model, optimizer = shared(here, **options)
        train(model, optimizer, 0, here.rank)
        dcp.save(_states(model, optimizer), checkpoint_id=at)
        full = here.all_say(_states(model, optimizer, options=FULL))[0]  # the first one has it
        mine = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        then = contents(model, optimizer)
        train(model, optimizer, STEPS, here.rank)
        later = contents(model, optimizer)
        for way in ("dcp", "full", "plainly"):
            model, optimizer = shared(here, model=another(), **options)
            if way == "dcp":
                found = _states(model, optimizer)
                dcp.load(found, checkpoint_id=at)
                _set(model, optimizer, found)
            elif way == "full":
                _set(model, optimizer, full, options=FULL)
            else:
                model.load_state_dict(mine[0])
                optimizer.load_state_dict(mine[1])
            assert not differing(contents(model, optimizer), then), way
            train(model, optimizer, STEPS, here.rank)
            assert not differing(contents(model, optimizer), later), way

    return loads


def _states(model: nn.Module, optimizer: Optimizer, **options: Any) -> dict[str, Any]:
    of_optimizer = dcp_states.get_optimizer_state_dict(model, optimizer, **options)
    return {"model": dcp_states.get_model_state_dict(model, **options), "optimizer": of_optimizer}


def _set(model: nn.Module, optimizer: Optimizer, found: dict[str, Any], **options: Any) -> None:
    dcp_states.set_model_state_dict(model, found["model"], **options)
    dcp_states.set_optimizer_state_dict(model, optimizer, found["optimizer"], **options)


def large() -> Any:
    """Some 60 MB, and a buffer; the ranks have unequal parts of the rows of the embedding."""
    model = Language(8191, 512, (nn.Linear(512, 512) for _ in range(40)), tied=True)
    model.register_buffer("mean", torch.arange(5.0))
    return model


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
    plain = large()
    size = sum(param.nbytes for param in plain.parameters())
    if here.rank == 0:
        package.save(plain, here.folder / "large", max_shard_size="20MB")
        assert len([*(here.folder / "large").glob("*.safetensors")]) > 2
    dist.barrier()
    megacompile(nn.Linear(4, 4), mesh=here.mesh, device="cpu")  # what is imported late
    with torch.device("meta"):
        model = large()
    with at_most(0.6 * size):
        megacompile(model, mesh=here.mesh, device="cpu", checkpoint=here.folder / "large")
    with at_most(0.85 * size):
        package.save(model, here.folder / "large again", max_shard_size="20MB")
    assert model.head.weight is model.embed.weight
    assert {type(param).__name__ for param in model.parameters()} == {"DTensor"}
    ours: Values = {name: whole(value) for name, value in model.state_dict().items()}
    assert not differing(ours, plain.state_dict())
    if here.rank == 0:
        assert files(here.folder / "large") == files(here.folder / "large again")


TWO: dict[str, Check] = {
    "rows of a checkpoint": rows_of_a_checkpoint,
    "save()": saves,
    "save() that fails": saves_that_fail,
    "one rank saves": one_saves,
}
MORE: dict[str, Check] = {
    **{f"checkpoints, {states}": checkpointed(states) for states in STATES},
}
FOUR: dict[str, Check] = {
    "save(), 2 x 2": lambda here: saves(here.pairs),
}
