"""Where a DistributedDataParallel or a DataParallel could not work: without a GPU, and on one.

With two processes: `tests.ranks.wrapped`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from megacompile import megacompile
from megacompile.errors import ModelError
from tests.inside import is_streamed, residents
from tests.ranks.wrapped import Net, UsersLine, inputs, twins


def node_of(model: nn.Module) -> Any:
    """What adds up the gradient of a parameter."""
    return get_gradient_edge(model.get_parameter("head.weight")).node


def test_buckets_move_where_nobody_holds_nodes() -> None:
    model = megacompile(UsersLine(), gpu_memory="1GiB")
    model(inputs()).mean().backward()
    called: list[Any] = []
    node = node_of(model)
    handle = node.register_hook(lambda *gradients: called.append(gradients))
    with pytest.warns(UserWarning, match=r"'head\.weight'"):
        model(inputs()).mean().backward()
    assert len(called) == 1 and not residents(model)
    handle.remove()
    free = megacompile(Net(), gpu_memory="1GiB")
    free(inputs()).mean().backward()
    with torch.inference_mode():
        free(inputs())
    assert residents(free)


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
        node = node_of(hooked)
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
