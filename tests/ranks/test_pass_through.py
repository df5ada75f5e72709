"""A DistributedDataParallel around what ranks share: what is refused, and what it answers.

Its numbers in several processes are those of plain loops, too: see the tests under torchrun.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megacompile import megacompile, save, unmegacompile
from megacompile.errors import ModelError
from tests.processes import group_of_one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


class Outer(nn.Module):
    """Has one more parameter than the model in it."""

    def __init__(self, net: nn.Module, *, trained: bool) -> None:
        super().__init__()
        self.net = net
        self.scale = nn.Parameter(torch.ones(1), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) * self.scale
        return result


class Other(DistributedDataParallel):
    pass


@pytest.fixture
def net() -> Iterator[nn.Module]:
    with group_of_one():
        yield megacompile(Net(), mesh=init_device_mesh("cpu", (1,)), device="cpu")


def mixed(net: nn.Module) -> Any:
    return DistributedDataParallel(net, mixed_precision=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda net: DistributedDataParallel(Outer(net, trained=True)), "'scale'"),
        (Other, "Other"),
        (mixed, "mixed_precision="),
        (lambda net: DistributedDataParallel(net).join(), "join"),
        (lambda net: DistributedDataParallel(net).register_comm_hook(None, print), "comm_hook"),
    ],
)
def test_what_is_not_that_of_a_plain_loop_is_refused(
    net: nn.Module, wrap: Callable[[nn.Module], Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        wrap(net)


def test_other_ranks_are_refused(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    with pytest.raises(ModelError, match=r"\[0\]"):
        DistributedDataParallel(net)


def test_ranks_do_not_share_what_has_one_in_it() -> None:
    with group_of_one():
        inner = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ModelError, match="DistributedDataParallel"):
            megacompile(nn.Sequential(inner), mesh=init_device_mesh("cpu", (1,)), device="cpu")


def test_the_first_rank_does_not_save_alone(net: nn.Module) -> None:
    class Saves(Net):
        def save_pretrained(self, folder: str, state_dict: Any = None) -> str:
            return folder

    mesh = init_device_mesh("cpu", (1,))
    shared: Any = megacompile(Saves(), mesh=mesh, device="cpu")
    with pytest.raises(ModelError, match="save_pretrained"):
        shared.save_pretrained("folder")
    gathered = shared.save_pretrained("folder", state_dict=states(shared))
    assert gathered == "folder"
    assert unmegacompile(shared).save_pretrained("folder") == "folder"


def test_all_ranks_have_the_first_ones_values(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is frozen beside what they share, and of buffers, also where these are not sent
    before each forward."""
    sent: list[Tensor] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor)
        return broadcast(tensor, *args, **options)

    monkeypatch.setattr(dist, "broadcast", noted)
    outer = Outer(net, trained=False)
    wrapped = DistributedDataParallel(outer, broadcast_buffers=False)
    wanted = {outer.scale.data_ptr(), *(buffer.data_ptr() for buffer in net.buffers())}
    assert {tensor.data_ptr() for tensor in sent} == wanted
    wrapped(torch.ones(2, 4))
    assert len(sent) == len(wanted)


def test_what_is_saved_is_gathered_one_by_one(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A state dict under a DistributedDataParallel would hold all of it at once, in every rank."""
    DistributedDataParallel(net)
    gathered: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    real = DTensor.full_tensor

    def noted(self: DTensor, **options: Any) -> Tensor:
        alive.append(sum(value() is not None for value in gathered))
        result: Tensor = real(self, **options)
        gathered.append(weakref.ref(result))
        return result

    monkeypatch.setattr(DTensor, "full_tensor", noted)
    save(net, tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert alive and max(alive) <= 1


def test_it_trains_saves_and_loads(net: nn.Module) -> None:
    plain = Net()
    plain.load_state_dict(states(net))
    wrapped = DistributedDataParallel(Outer(net, trained=False), broadcast_buffers=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, plain)]
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for call, optimizer in zip((wrapped, plain), optimizers, strict=True):
            with wrapped.no_sync() if step % 2 else contextlib.nullcontext():
                call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found, expected = wrapped.module.state_dict(), plain.state_dict()
    for name, value in expected.items():
        assert type(found[f"net.{name}"]) is Tensor
        torch.testing.assert_close(found[f"net.{name}"], value)
    saved, there = (each.state_dict() for each in optimizers)
    for i, state in there["state"].items():
        for name, value in state.items():
            assert type(saved["state"][i][name]) is Tensor
            torch.testing.assert_close(saved["state"][i][name], value)
    wrapped.module.load_state_dict({name: value + 1 for name, value in found.items()})
    torch.testing.assert_close(states(net)["layers.0.weight"], expected["layers.0.weight"] + 1)


def states(net: nn.Module) -> dict[str, Tensor]:
    """Whole, as a state dict."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in net.state_dict().items()
    }
