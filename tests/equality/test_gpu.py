"""What only a GPU can show: pinned memory, races between streams, peak memory, side streams.

The same loops on the CPU, on an adversarial device: test_table.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import accumulate, megacompile
from megacompile.ir.stream import Stream
from tests import inside
from tests.training import losses_of
from tests.zoo import Block, Stack, Tower, batch, equal, stack, step

pytestmark = pytest.mark.gpu

MILLISECOND = 1_800_000  # cycles, about
SEEDS = 20


@contextlib.contextmanager
def delayed(model: nn.Module, cycles: Callable[[Stream], int]) -> Iterator[list[int]]:
    """For its duration a sleep precedes every op on its stream; gives the cycles so far."""
    slept: list[int] = []

    def sleep(stream: Stream) -> None:  # runs with `stream` as the current one
        slept.append(cycles(stream))
        if slept[-1]:
            torch.cuda._sleep(slept[-1])

    with inside.before_each_op(model, sleep):
        yield slept


def random_cycles(seed: int) -> Callable[[Stream], int]:
    """Up to a millisecond for each third op."""
    generator = random.Random(seed)
    return lambda stream: generator.choice((0, 0, generator.randrange(MILLISECOND)))


def cycles_on(slow: Stream) -> Callable[[Stream], int]:
    """Two milliseconds for each op of one stream."""
    return lambda stream: 2 * MILLISECOND if stream is slow else 0


def poison(model: Any) -> None:
    """NaN in every slot and host buffer that is written anew: what is read too early shows."""
    machine = inside.machine(model)
    for buffer in machine.slots.buffers:
        buffer.fill_(255)
    for bucket in machine.buckets.values():
        for gradient in bucket.grads.values():
            gradient.fill_(torch.nan)
    assert machine.activations.held_bytes >= machine.activations.lent_bytes
    for free in machine.activations._free:
        free.memory.bytes(free.size_bytes).fill_(255)


def twins(*, choice: Any = None, **options: Any) -> tuple[Any, Any]:
    """(a plain model on the GPU, the same one streamed); a choice is what a plan is made from."""
    torch.manual_seed(0)
    model = Stack(layers=6, block=lambda: Block(dropout=0.2))
    plain = copy.deepcopy(model).cuda()
    megacompile(model, **{**STREAMED, "lowering": "eager", **options})
    if choice is not None:
        inside.choose(model, **choice)
    return plain, model


# Everything is streamed and recomputed, though there is room for all of it.
STREAMED: dict[str, Any] = {"device": "cuda", "resident": 0, "activations": "recompute"}


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.cuda() for key, value in inputs.items()}


def gradients(model: nn.Module, micro_batches: int = 2) -> dict[str, Tensor]:
    """Those of several backwards, the later ones added; read the moment backward() returns."""
    model.zero_grad()
    for i in range(micro_batches):
        torch.manual_seed(i)
        model(**on_gpu(batch(i))).backward()
    return {
        name: p.grad.detach().to("cpu", copy=True)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_equal(wanted: dict[str, Tensor], got: dict[str, Tensor], what: object) -> None:
    assert list(wanted) == list(got), what
    wrong = [name for name in wanted if not equal(wanted[name], got[name])]
    assert wrong == [], f"{what}: {wrong}"


def mapping_bytes(tensor: Tensor) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return end - start
    raise AssertionError("nowhere")


def test_pinned_memory_has_the_exact_size_and_is_unlocked_when_it_goes() -> None:
    """33 MiB and a bit take 33 MiB and a page; the caching host allocator would take 64. To lock an
    address range that is still locked would fail, and warn."""
    size = (33 * 2**20 + 12) // 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            bucket = inside.pinned_bucket(nn.Parameter(torch.ones(size)))
            assert mapping_bytes(bucket.flat) == 33 * 2**20 + 4096
            bucket.make_grads()
            assert mapping_bytes(bucket.grads[0]) == 33 * 2**20 + 4096
            for memory in (bucket.flat, bucket.grads[0]):
                assert memory[:1].is_pinned() and memory[-1:].is_pinned()
            del bucket, memory
            gc.collect()


RACES: list[dict[str, Any]] = [
    {},
    {"lookahead": 1},
    {"lookahead": 3, "slots": 6},
    *({"lookahead": 1, "activations": choice} for choice in ("keep", "selective", "offload")),
    {"lookahead": 1, "activations": "auto", "choice": {"keep": 1, "saved_on_host": 2}},
]


@pytest.mark.parametrize("options", RACES, ids=str)
def test_delays_change_nothing(options: dict[str, Any]) -> None:
    """Whatever is late, those that need it wait; host buffers are lent to the next micro-batch."""
    plain, model = twins(**options)
    wanted = gradients(plain, 3)
    assert_equal(wanted, gradients(model, 3), "no delays")
    for param in model.parameters():
        assert param.is_pinned() and param.grad.is_pinned()
    offloads = options.get("activations") == "offload"
    pool = inside.machine(model).activations
    assert bool(pool.peak_bytes) == offloads or "choice" in options
    assert pool.lent_bytes == 0 and (pool.held_bytes == pool.peak_bytes or not offloads)
    for buffer in pool._free:
        assert buffer.memory.bytes(buffer.size_bytes).is_pinned()
        assert len(buffer.memory) == max(buffer.size_bytes, mmap.PAGESIZE)
    late = {str(seed): random_cycles(seed) for seed in range(SEEDS)}
    late |= {stream.value: cycles_on(stream) for stream in Stream}
    for name, cycles in late.items():
        with delayed(model, cycles) as slept:
            poison(model)
            assert_equal(wanted, gradients(model, 3), name)
            assert not name.isdigit() or sum(slept) > 0


def test_delays_show_a_race_that_is_there() -> None:
    """The test of the tests: without the waits between streams, the numbers are wrong."""
    plain, model = twins()
    wanted = gradients(plain)
    assert_equal(wanted, gradients(model), "no delays")
    with delayed(model, cycles_on(Stream.H2D)), inside.before_each_op(model, None):
        poison(model)
        got = gradients(model)
    assert any(not equal(wanted[name], got[name]) for name in wanted)
    torch.cuda.synchronize()


def test_host_memory_may_be_edited_when_the_call_returns() -> None:
    """A parameter, whose last prefetch is done then, and an input that is page-locked."""
    _, model = twins()
    model.eval()
    x = batch()["x"].pin_memory()
    with torch.no_grad():
        wanted = model(x).clone()
        with delayed(model, cycles_on(Stream.COMPUTE)):
            torch.cuda._sleep(10 * MILLISECOND)
            got = model(x)
            x.fill_(torch.nan)
            assert equal(got, wanted)
        x.copy_(batch()["x"])
        with delayed(model, cycles_on(Stream.H2D)):
            for param in model.parameters():
                param.mul_(1)  # edited: nothing is taken from the slots that it is left in
            poison(model)
            got = model(x)
            for param in model.parameters():
                param.fill_(torch.nan)
            assert equal(got, wanted)
        assert not equal(model(x), wanted), "the next call sees the edit"


@pytest.mark.parametrize("forward_aside", [True, False], ids=["forward aside", "forward"])
@pytest.mark.parametrize("backward_aside", [True, False], ids=["backward aside", "backward"])
def test_forward_and_backward_in_side_streams(forward_aside: bool, backward_aside: bool) -> None:
    plain, model = twins()
    wanted_x = batch()["x"].cuda().requires_grad_()
    torch.manual_seed(0)
    plain(wanted_x, batch()["y"].cuda()).backward()
    main = torch.cuda.current_stream()
    forward_stream = torch.cuda.Stream() if forward_aside else main
    backward_stream = torch.cuda.Stream() if backward_aside else main
    gradients(model)  # everything is compiled
    for seed in range(5):
        with delayed(model, random_cycles(seed)):
            model.zero_grad()
            poison(model)
            x = batch()["x"].cuda().requires_grad_()
            y = batch()["y"].cuda()
            torch.manual_seed(0)
            forward_stream.wait_stream(main)
            with torch.cuda.stream(forward_stream):
                loss = model(x, y)
            backward_stream.wait_stream(forward_stream)
            with torch.cuda.stream(backward_stream):
                loss.backward()
            got = {n: p.grad.clone() for n, p in model.named_parameters()}  # on the host: no wait
            main.wait_stream(backward_stream)
            main.wait_stream(forward_stream)
            assert_equal({n: p.grad.cpu() for n, p in plain.named_parameters()}, got, seed)
            assert x.grad is not None and equal(x.grad.cpu(), wanted_x.grad.cpu())


def peak_bytes(run: Callable[[], object]) -> int:
    """The most device memory that `run` takes beyond what was taken before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_peak_memory_is_far_below_the_resident_models(lowering: str) -> None:
    """Megacompiling and tracing included: three slots and a few gradients of 96 matrices."""
    layers = (nn.Linear(2048, 2048, bias=False) for _ in range(48))  # of 16 MiB
    model = Tower(layers, lambda layer, x: torch.tanh(layer(x)))
    alone: dict[str, Any] = {"slots": 3, "device_update": 0}  # a plan may use what memory there is
    x = torch.randn(8, 2048)

    def resident() -> None:
        plain = copy.deepcopy(model).cuda()
        for _ in range(2):
            plain(x.cuda()).backward()

    def streamed() -> None:
        made = megacompile(copy.deepcopy(model), lowering=lowering, **alone, **STREAMED)
        for _ in range(2):
            made(x).backward()

    gradients(twins()[1])  # a process measures its machine's rates once, in some GB
    most, least = peak_bytes(resident), peak_bytes(streamed)
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    assert most >= 2 * weights, "weights and gradients"
    assert least < most / 4, (least, most)


def test_device_memory_does_not_grow_from_step_to_step() -> None:
    _, model = twins()
    gradients(model)
    first = peak_bytes(lambda: gradients(model))
    left = torch.cuda.memory_allocated()
    for _ in range(5):
        assert peak_bytes(lambda: gradients(model)) <= first
        assert torch.cuda.memory_allocated() <= left


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> list[float]:
    """Losses of six steps; the updates overlap with the next forward."""
    inputs = [on_gpu(batch(k)) for k in range(6)]
    return losses_of(model, optimizer, inputs, clip=0.05 if clip else 0.0)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize(
    "how",
    [
        *("on the host", "in the backward", "on the host, delayed", "in the backward, delayed"),
        *("planned", "planned, delayed"),
    ],
)
def test_training_equals_the_plain_loop(how: str, lowering: str) -> None:
    plain = stack()[0].cuda()
    streamed = stack()[0]
    adamw = torch.optim.AdamW
    in_backward = how.startswith("in the backward")
    optimizer = adamw(streamed.parameters(), 0.01)
    options = {} if how.startswith("planned") else STREAMED
    streamed = megacompile(
        streamed, lowering=lowering, optimizer=optimizer if in_backward else None, **options
    )
    wanted = train(plain, adamw(plain.parameters(), 0.01), clip=not in_backward)
    late = delayed(streamed, random_cycles(3)) if "delayed" in how else contextlib.nullcontext()
    with late:
        got = train(streamed, optimizer, clip=not in_backward)
    assert got == pytest.approx(wanted, rel=1e-4)
    for mine, theirs in zip(streamed.parameters(), plain.parameters(), strict=True):
        mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)


def test_another_name_of_a_parameter_has_the_new_value_when_the_backward_returns() -> None:
    """Nobody can make its reader wait: the update in the backward is on its way for a while."""
    model = stack()[0]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model = megacompile(model, optimizer=optimizer, **STREAMED)
    aliases = {name: p.detach() for name, p in model.named_parameters()}
    for k in range(3):
        late = delayed(model, cycles_on(Stream.D2H)) if k else contextlib.nullcontext()
        with late:  # everything is compiled by then
            step(model, on_gpu(batch(k)))
            seen = {name: alias.clone() for name, alias in aliases.items()}
            optimizer.step()
            optimizer.zero_grad()
            assert_equal({n: p.detach() for n, p in model.named_parameters()}, seen, k)


@pytest.mark.parametrize("states", [None, "int8"])
@pytest.mark.parametrize("masters", [None, torch.bfloat16], ids=["", "masters"])
@pytest.mark.parametrize("micro", [1, 3])
def test_residents_are_updated_as_what_is_streamed(states: Any, masters: Any, micro: int) -> None:
    """In the backward, by the same kernel, on the bucket's own memory. Inductor rounds a kept stage
    otherwise than a recomputed one."""
    found, norms = [], []
    for resident in (0, "20KiB", "all"):
        model = stack()[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {"state_dtype": states, "compute_dtype": masters}
        options |= {**STREAMED, "resident": resident, "optimizer": optimizer}
        model = megacompile(model, lowering="inductor", **options)
        for i in range(3):
            for k in range(micro - 1):
                with accumulate(model):
                    step(model, on_gpu(batch(10 * i + k)))
            step(model, on_gpu(batch(10 * i + 9)))
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf).cpu())
            optimizer.step()
            optimizer.zero_grad()
        assert bool(inside.residents(model)) == bool(resident)
        found.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    assert_equal(found[0], found[1], "some resident")
    assert_equal(found[0], found[2], "all resident")
    torch.testing.assert_close(norms[:3], norms[3:6])  # summed on the host, and on the device
