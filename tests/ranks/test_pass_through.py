"""A DistributedDataParallel around what ranks share: what is refused, and what it answers.

In several processes: `passes_through` of `tests.ranks.wrapped`, and `test_torchrun.py`. And
where a DistributedDataParallel or a DataParallel could not work: without a GPU, and on one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from megacompile import megacompile, save
from megacompile.errors import ModelError, RankError
from tests import inside
from tests.equality.nets import Applies
from tests.inside import is_streamed
from tests.processes import group_of_one
from tests.ranks.wrapped import Net, inputs, twins

Wrap: Any = DistributedDataParallel


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def outer(net: nn.Module, *, trained: bool) -> Any:
    """Has one more parameter than the model in it."""
    scale = nn.Parameter(torch.ones(1), requires_grad=trained)
    return Applies(lambda model, x: model.net(x) * model.scale, net=net, scale=scale)


class Other(DistributedDataParallel):
    pass


@pytest.fixture
def net() -> Iterator[nn.Module]:
    with group_of_one():
        yield megacompile(Normed(), mesh=init_device_mesh("cpu", (1,)), device="cpu")


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda net: Wrap(outer(net, trained=True)), "'scale'"),
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
    with pytest.raises(ModelError, match=r"\[0, 1\]"):
        DistributedDataParallel(net)


def test_ranks_do_not_share_what_has_one_in_it() -> None:
    with group_of_one():
        inner = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ModelError, match="DistributedDataParallel"):
            megacompile(nn.Sequential(inner), mesh=init_device_mesh("cpu", (1,)), device="cpu")


def test_the_first_rank_does_not_save_alone(net: nn.Module) -> None:
    class Saves(Normed):
        def save_pretrained(self, folder: str, state_dict: Any = None) -> str:
            return folder

    shared: Any = megacompile(Saves(), mesh=init_device_mesh("cpu", (1,)), device="cpu")
    with pytest.raises(ModelError, match="save_pretrained"):
        shared.save_pretrained("folder")
    whole = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in shared.state_dict().items()}
    assert shared.save_pretrained("folder", state_dict=whole) == "folder"


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
    around = outer(net, trained=False)
    wrapped = DistributedDataParallel(around, broadcast_buffers=False)
    wanted = {around.scale.data_ptr(), *(buffer.data_ptr() for buffer in net.buffers())}
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


def test_a_data_parallel_that_would_call_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel of torch, which Trainer makes where it sees several GPUs. Without a GPU it calls
    its module, and that is all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain, ours = twins(Net)
    megacompile(ours, device="cpu", lowering="eager")
    wrapped = nn.DataParallel(plain)
    assert torch.equal(wrapped(inputs()), nn.DataParallel(ours)(inputs()))
    megacompile(copy.deepcopy(wrapped), device="cpu")
    wrapped.device_ids = [0]
    with pytest.raises(ModelError, match="DataParallel"):
        megacompile(wrapped, device="cpu")
    assert not is_streamed(wrapped)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="DataParallel"):
        nn.DataParallel(nn.Sequential(ours))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:megacompile. every parameter stays")
def test_one_process_on_a_gpu(tmp_path: Path) -> None:
    """DDP over host parameters gives the plain gradients, and refuses what it cannot do."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        plain, ours = twins(Net)
        plain.cuda()
        with pytest.raises(ModelError, match="DataParallel"):
            megacompile(nn.DataParallel(copy.deepcopy(plain), device_ids=[0]))
        hooked = copy.deepcopy(plain)
        node: Any = get_gradient_edge(hooked.get_parameter("head.weight")).node
        handle = node.register_hook(lambda *gradients: None)
        with pytest.raises(ModelError, match=r"head\.weight"):
            megacompile(hooked)
        assert not is_streamed(hooked) and all(param.is_cuda for param in hooked.parameters())
        handle.remove()
        with pytest.raises(ModelError, match="DistributedDataParallel"):
            megacompile(DistributedDataParallel(copy.deepcopy(plain), device_ids=[0]))
        earlier = copy.deepcopy(plain)
        wrapped: nn.Module = DistributedDataParallel(earlier, device_ids=[0])
        megacompile(earlier)
        with pytest.raises(ModelError, match="cuda"):
            wrapped(inputs().cuda())
        megacompile(ours, lowering="eager")
        with pytest.raises(ModelError, match="device_ids"):
            DistributedDataParallel(ours, device_ids=[0])
        wrapped = DistributedDataParallel(ours)
        for k in range(3):
            for model, x in ((plain, inputs(k).cuda()), (wrapped, inputs(k))):
                model(x).square().mean().backward()
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                assert q.device.type == "cpu"
                assert torch.allclose(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6)
    finally:
        dist.destroy_process_group()
