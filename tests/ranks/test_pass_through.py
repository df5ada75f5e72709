"""A DistributedDataParallel around what ranks share: what is refused, and what it answers.

In several processes: `passes_through` of `tests.ranks.wrapped`, and `test_other_loops.py`.
"""

from __future__ import annotations

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
from torch.optim import AdamW

from megacompile import megacompile, save, unmegacompile
from megacompile.errors import ModelError, RankError
from tests import inside
from tests.processes import group_of_one

Wrap: Any = DistributedDataParallel


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


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda net: Wrap(Outer(net, trained=True)), "'scale'"),
        (Other, "Other"),
        (lambda net: Wrap(net, mixed_precision=object()), "mixed_precision="),
        (lambda net: Wrap(net).join(), "join"),
        (lambda net: Wrap(net).register_comm_hook(None, print), "comm_hook"),
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

    shared: Any = megacompile(Saves(), mesh=init_device_mesh("cpu", (1,)), device="cpu")
    with pytest.raises(ModelError, match="save_pretrained"):
        shared.save_pretrained("folder")
    whole = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in shared.state_dict().items()}
    assert shared.save_pretrained("folder", state_dict=whole) == "folder"
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


def test_a_model_that_lives_keeps_no_group_that_was_destroyed() -> None:
    """Process groups belong to torch. Nor does what the models of the same ranks have together."""
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model: Any = megacompile(nn.Sequential(nn.Linear(4, 4)), mesh=mesh, device="cpu")
        model(torch.ones(2, 4)).sum().backward()
        AdamW(model.parameters()).step()
        ranks = inside.machine(model).ranks
        assert ranks is not None and ranks.group is not None
    assert [group() for group in ranks.groups] == [None]
    with pytest.raises(RankError, match="destroy_process_group"):
        _ = ranks.group
