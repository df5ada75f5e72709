"""DistributedDataParallel around, inside of and before a megacompiled model.

Two processes with gloo run all cases once; what each found comes back by the case's name.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.test_shared_gradients import Broken, Eager, Net, inputs
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megacompile import compat, megacompile
from megacompile.errors import ModelError
from megacompile.runtime.model.buckets import ModelBuckets
from megacompile.runtime.model.data_parallel import (
    devices_of,
    refuse_moves,
    refuse_other_device,
    refuse_unreduced,
)
from tests.inside import is_streamed, residents
from tests.inside import streamed as streamed_of
from tests.zoo import equal

WORLD = 2
TIMEOUT_S = 240
STEPS = 4
Case = Callable[[int], None]


class Sometimes(Net):
    """One layer is never used, and another only on one rank, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return super().forward(self.other(x) if other else x)


class Wide(Net):
    """Its gradients take several of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
            for _ in range(4)
        )


# --- the cases, which run in both processes


def around(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(megacompile(model), **options)


def before(model: nn.Module, **options: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model, **options)
    megacompile(model)
    return wrapped


def inside(model: nn.Module, **options: Any) -> nn.Module:
    return megacompile(DistributedDataParallel(model, **options))


def same(expected: nn.Module, got: nn.Module, what: str) -> None:
    """Parameters and gradients, bit by bit."""
    for (name, p), q in zip(expected.named_parameters(), got.parameters(), strict=True):
        assert equal(p.detach(), q.detach()), f"{what}: {name}"
        assert (p.grad is None) == (q.grad is None), f"{what}: gradient of {name}"
        if p.grad is not None and q.grad is not None:
            assert equal(p.grad, q.grad), f"{what}: gradient of {name}"


def same_on_all_ranks(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        theirs = param.detach().clone()
        distributed.broadcast(theirs, 0)
        assert equal(theirs, param.detach()), f"{name} differs from that of rank 0"


def twins(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = kind()
    return plain, copy.deepcopy(plain)


def loss_of(model: Any, k: int, rank: int) -> Tensor:
    x = inputs(100 * k + rank)
    output: Tensor = model(x, rank == k % 2) if "Sometimes" in repr(model) else model(x)
    return output.square().mean()


def trains(
    wrap: Callable[..., nn.Module], kind: type[Net] = Net, no_sync: bool = True, **options: Any
) -> Case:
    """Clipped AdamW steps are those of plain DDP."""

    def case(rank: int) -> None:
        plain, ours = twins(kind)
        pairs = ((plain, DistributedDataParallel(plain, **options)), (ours, wrap(ours, **options)))
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model, _ in pairs]
        for k in range(STEPS):
            losses = []
            for (_, wrapped), optimizer in zip(pairs, optimizers, strict=True):
                optimizer.zero_grad()
                if no_sync and k % 2:
                    ddp: Any = wrapped
                    with ddp.no_sync():
                        loss_of(wrapped, k + 50, rank).backward()
                loss = loss_of(wrapped, k, rank)
                loss.backward()
                losses.append(loss.detach())
            same(plain, ours, f"step {k}")
            both = [torch.empty(()) for _ in range(WORLD)]
            distributed.all_gather(both, losses[1])
            assert equal(*losses) and not equal(*both), "the ranks have other data"
            for (model, _), optimizer in zip(pairs, optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            same(plain, ours, f"behind step {k}")
        same_on_all_ranks(ours)

    return case


def mean_of_own_gradients(rank: int) -> None:
    plain, ours = twins(Net)
    wrapped = around(ours)
    loss_of(plain, 0, rank).backward()
    loss_of(wrapped, 0, rank).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        own = p.grad.clone()
        distributed.all_reduce(p.grad)
        assert not equal(own, q.grad)
        assert equal(p.grad / WORLD, q.grad)


def one_graph_for_several_buckets(rank: int) -> None:
    """Dynamo would split what it captures at DDP's buckets."""
    plain, ours = twins(Wide)
    pairs = [DistributedDataParallel(plain, bucket_cap_mb=1), around(ours, bucket_cap_mb=1)]
    for k in range(3):
        for wrapped in pairs:
            loss_of(wrapped, k, rank).backward()
    same(plain, ours, "the third backward")
    streamed: Any = streamed_of(ours)
    assert len(streamed.graphs) == 1


def by_hand(rank: int) -> None:
    """Collectives on gradients, and on parameters whose update is in flight."""
    plain, ours = twins(Wide)
    megacompile(ours)
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for k in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, k, rank).backward()
            for param in model.parameters():
                assert param.grad is not None
                if k == 2:
                    distributed.broadcast(param.grad, 1)
                else:
                    distributed.all_reduce(param.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            for param in model.parameters():
                with torch.no_grad():
                    distributed.broadcast(param if k % 2 else param.data, k % 2)
    same(plain, ours, "the last step")


def zero_redundancy(rank: int) -> None:
    plain, ours = twins(Net)
    for model, wrapped in ((plain, DistributedDataParallel(plain)), (ours, around(ours))):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for k in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, k, rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    same(plain, ours, "the last step")


def comm_hook(rank: int) -> None:
    plain, ours = twins(Net)
    for wrapped in (DistributedDataParallel(plain), around(ours)):
        hooked: Any = wrapped
        hooked.register_comm_hook(None, fp16_compress_hook)
        for k in range(STEPS):
            loss_of(wrapped, k, rank).backward()
    same(plain, ours, "the last backward")


def refused(rank: int, attempt: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    """With `optimizer=`, before any parameter has changed."""
    plain, ours = twins(Net)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    with pytest.raises(ModelError, match="optimizer=, .* leave out optimizer= of megacompile"):
        attempt(ours, optimizer)
    same(plain, ours, "behind the refusal")
    distributed.barrier()


# As where a line of a user runs before the captured graph: buckets move behind that call.
USERS_LINE_FIRST = mock.patch.object(compat, "is_called_first", return_value=False)


def update_in_backward_around(rank: int) -> None:
    refused(rank, lambda model, of: DistributedDataParallel(megacompile(model, optimizer=of)))


def update_in_backward_before(rank: int) -> None:
    def attempt(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        wrapped = DistributedDataParallel(model)
        megacompile(model, optimizer=optimizer)
        loss_of(wrapped, 0, rank).backward()

    refused(rank, attempt)


def update_in_backward_inside(rank: int) -> None:
    refused(rank, lambda model, of: megacompile(DistributedDataParallel(model), optimizer=of))


def no_bucket_moves(rank: int) -> None:
    """The plan has none on the device, nor does one go there that was planned for it before."""
    plain, ours = twins(Net)
    megacompile(ours, gpu_memory="1GiB")
    wrapped = DistributedDataParallel(ours)
    loss_of(wrapped, 0, rank).backward()
    loss_of(wrapped, 1, rank).backward()
    assert not residents(ours)
    later = copy.deepcopy(plain)
    megacompile(later, gpu_memory="1GiB")
    with USERS_LINE_FIRST:
        loss_of(later, 0, rank).backward()
    later.zero_grad()
    with pytest.warns(UserWarning, match="megacompile: every parameter stays .* Distributed"):
        loss_of(DistributedDataParallel(later), 1, rank).backward()
    assert not residents(later)


def made_for_another_device(rank: int) -> None:
    """As DDP is that was made over parameters on a GPU, before megacompile()."""
    _, ours = twins(Net)
    wrapped = before(ours)
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.device_type = "cuda"
    with pytest.raises(ModelError, match="made when parameter '.*' was on cuda"):
        loss_of(wrapped, 0, rank)
    distributed.barrier()


def wrapped_as_on_a_gpu(rank: int) -> None:
    """The checks get the arguments of DDP and the process group's backends."""
    _, ours = twins(Net)
    megacompile(ours)
    streamed: Any = streamed_of(ours)
    streamed.buckets.data_parallel.device = torch.device("cuda")
    with pytest.raises(ModelError, match=r"no device_ids or output_device, got \[0\]"):
        DistributedDataParallel(ours, [0])
    with pytest.raises(ModelError, match=r"no device_ids or output_device, got \[0\]"):
        DistributedDataParallel(module=nn.Sequential(ours), device_ids=[0])
    assert devices_of(None) == frozenset(("cpu", "cuda"))  # gloo is for both
    DistributedDataParallel(ours)
    distributed.barrier()


def inside_of_what_moves(rank: int) -> None:
    """As megacompile() of a DDP over parameters on a GPU."""
    _, model = twins(Net)
    wrapped = DistributedDataParallel(model)
    refuse_moves(wrapped, lambda param: "cpu")
    with pytest.raises(
        ModelError, match="has a DistributedDataParallel in it, .* from cpu to cuda"
    ):
        refuse_moves(wrapped, lambda param: "cuda")
    distributed.barrier()


CASES: dict[str, Case] = {
    "around": trains(around),
    "around, a graph break": trains(around, Broken),
    "around, eager code": trains(around, Eager),
    "around, unused": trains(around, Sometimes, no_sync=False, find_unused_parameters=True),
    "around, views": trains(around, gradient_as_bucket_view=True),
    "around, static": trains(around, no_sync=False, static_graph=True),
    "before": trains(before),
    "before, a graph break": trains(before, Broken),
    "inside": trains(inside, no_sync=False),
    "inside, eager code": trains(inside, Eager, no_sync=False),
    **{
        case.__name__: case
        for case in (
            mean_of_own_gradients,
            one_graph_for_several_buckets,
            by_hand,
            zero_redundancy,
            comm_hook,
            update_in_backward_around,
            update_in_backward_before,
            update_in_backward_inside,
            no_bucket_moves,
            made_for_another_device,
            wrapped_as_on_a_gpu,
            inside_of_what_moves,
        )
    },
}


# --- the processes


def work(rank: int, folder: str) -> None:
    """What a process does: every case; its faults are in the file of its rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    faults: dict[str, str] = {}
    for name, case in CASES.items():
        torch.compiler.reset()
        try:
            case(rank)
        except BaseException:
            faults[name] = traceback.format_exc()
            torch.save(faults, f"{folder}/{rank}")
            break  # the other rank may wait for this one: no case behind it means anything
        faults[name] = ""
        torch.save(faults, f"{folder}/{rank}")
    else:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, str]]]:
    """By rank and case: what was wrong, or "" """
    folder = tmp_path_factory.mktemp("ddp")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, str(folder))) for rank in range(WORLD)]
    end = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    yield [_read(folder / str(rank)) for rank in range(WORLD)]


def _read(path: Path) -> dict[str, str]:
    return torch.load(path) if path.exists() else {}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, faults: list[dict[str, str]]) -> None:
    for rank, found in enumerate(faults):
        assert case in found, f"rank {rank} has not run it"
        assert not found[case], f"rank {rank}: {found[case]}"


# --- devices, without one


def test_a_hook_on_a_node_that_megacompile_would_replace() -> None:
    model = Net()
    node: Any = compat.accumulator_of(model.head.weight)
    handle = node.register_prehook(lambda gradients: None)
    refuse_moves(model, lambda param: "cpu")
    refuse_moves(model, lambda param: "cpu" if param is model.head.weight else "cuda")
    with pytest.raises(ModelError, match=r"Net\.head\.weight, .* from cpu to cuda"):
        refuse_moves(model, lambda param: "cuda")
    handle.remove()
    refuse_moves(model, lambda param: "cuda")


def test_megacompile_refuses_such_a_hook_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net()
    places = [param.data_ptr() for param in model.parameters()]
    node: Any = compat.accumulator_of(model.head.weight)
    handle = node.register_hook(lambda *gradients: None)
    monkeypatch.setattr(ModelBuckets, "_goes_to", lambda *_: lambda param: "cuda")
    with pytest.raises(ModelError, match=r"register hooks on nodes after megacompile\(\)"):
        megacompile(model)
    assert places == [param.data_ptr() for param in model.parameters()]
    assert not is_streamed(model)
    handle.remove()
    megacompile(model)


def test_a_hook_on_a_node_keeps_buckets_where_they_are() -> None:
    model = megacompile(Net(), gpu_memory="1GiB")
    with USERS_LINE_FIRST:
        model(inputs()).mean().backward()
    node: Any = compat.accumulator_of(model.head.weight)
    called: list[Any] = []
    node.register_hook(lambda *gradients: called.append(gradients))
    with pytest.warns(UserWarning, match=r"every parameter stays .* 'head\.weight'"):
        model(inputs()).mean().backward()
    assert len(called) == 1
    assert not residents(model)


def test_buckets_move_where_nobody_holds_nodes() -> None:
    model = megacompile(Net(), gpu_memory="1GiB")
    model(inputs()).mean().backward()
    with torch.inference_mode():
        model(inputs())
    assert residents(model)


def test_a_wrap_that_was_made_for_another_device() -> None:
    params = dict(Net().named_parameters())
    refuse_other_device("Net", params, "cpu")
    with pytest.raises(ModelError, match=r"was on cuda; it is on cpu now, .* after megacompile"):
        refuse_other_device("Net", params, "cuda")
    for param in params.values():
        param.requires_grad_(False)
    refuse_other_device("Net", params, "cuda")


def unreduced(**changed: Any) -> None:
    case: dict[str, Any] = {
        "computes_on": "cuda",
        "lies_on": {"cpu"},
        "others_on": {"cpu"},
        "device_ids": None,
        "reduces_on": {"cpu", "cuda"},
    }
    refuse_unreduced("Net", **(case | changed))


def test_a_wrap_that_could_not_reduce_gradients_on_the_host() -> None:
    unreduced()
    unreduced(reduces_on=None)
    line = r'init_process_group\("cpu:gloo,cuda:nccl"\) and DistributedDataParallel\(model\)'
    with pytest.raises(ModelError, match=rf"backends for cuda\); write {line}"):
        unreduced(reduces_on={"cuda"})
    with pytest.raises(ModelError, match=rf"no device_ids .* got \[0\]; write {line}"):
        unreduced(device_ids=[0])
    with pytest.raises(ModelError, match=rf"others are on cuda; .* {line}"):
        unreduced(others_on={"cpu", "cuda"})
    unreduced(lies_on={"cuda"}, others_on={"cuda"}, device_ids=[0], reduces_on={"cuda"})
    unreduced(computes_on="cpu", device_ids=[0])  # torch's own error


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
    with pytest.raises(
        ModelError, match=r"megacompile\(\): DataParallel has .* a process for each"
    ):
        megacompile(wrapped, device="cpu")
    assert not is_streamed(wrapped)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match=r"^DataParallel\(\): Net .*CUDA_VISIBLE_DEVICES=0"):
        nn.DataParallel(nn.Sequential(ours))


# --- on a GPU


@pytest.mark.gpu
def test_a_data_parallel_on_a_gpu() -> None:
    plain, ours = twins(Net)
    wrapped = nn.DataParallel(plain.cuda(), device_ids=[0])
    assert wrapped(inputs().cuda()).is_cuda, "none of a plain model is refused"
    with pytest.raises(ModelError, match="has a DataParallel in it"):
        megacompile(wrapped)
    with pytest.raises(ModelError, match="got a DataParallel around it"):
        nn.DataParallel(megacompile(ours))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:megacompile. every parameter stays")
def test_one_process_on_a_gpu(tmp_path: Path) -> None:
    """DDP over host parameters gives the plain gradients, and refuses what it cannot do."""
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        plain, ours = twins(Net)
        plain.cuda()
        hooked = copy.deepcopy(plain)
        parameter: Any = hooked.get_parameter("head.weight")
        node: Any = compat.accumulator_of(parameter)
        handle = node.register_hook(lambda *gradients: None)
        with pytest.raises(ModelError, match="from cuda to cpu"):
            megacompile(hooked)
        handle.remove()
        with pytest.raises(ModelError, match="has a DistributedDataParallel in it"):
            megacompile(DistributedDataParallel(copy.deepcopy(plain), device_ids=[0]))
        earlier = copy.deepcopy(plain)
        wrapped: nn.Module = DistributedDataParallel(earlier, device_ids=[0])
        megacompile(earlier)
        with pytest.raises(ModelError, match="was on cuda; it is on cpu now"):
            wrapped(inputs().cuda())
        megacompile(ours, lowering="eager")
        with pytest.raises(ModelError, match="no device_ids or output_device"):
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
        distributed.destroy_process_group()
