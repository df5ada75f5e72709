"""CUDA graphs of models that fit: what a replay overwrites, and when the code itself runs. A device
that captures is emulated: a replay runs the code again, on the addresses of its capture. The
numbers are equal in every bit to the same model without. On a GPU, to real graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import explain, megacompile
from tests import inside
from tests.equality.nets import Applies

pytestmark = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")

STEPS = 16
SETTLED = 12  # steps after which each call is a replay, in a plain loop


class Emulated:
    """A device that captures: see `megacompile.runtime.device.replay.CudaGraphs`."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.fails = fails
        self.captures = self.replays = 0
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # those that are there
        self.shared: list[list[Tensor]] = []  # results of graphs that share memory, by capture

    def capture(
        self, code: Any, inputs: list[Tensor], *, leaves: bool
    ) -> tuple[Callable[[], None], list[Any]]:
        if self.fails is not None:
            raise self.fails
        self.captures += 1
        state = torch.get_rng_state()
        results = list(code(inputs))
        torch.set_rng_state(state)
        places = [_at_address(x) if isinstance(x, Tensor) else x for x in inputs]
        given = {_memory(x) for x in inputs if isinstance(x, Tensor)}
        own = [r for r in results if _memory(r) not in given]
        pool = [] if leaves else self.shared
        pool.append(own)
        place = len(pool)

        def replay() -> None:
            self.replays += 1
            for later in pool[place:]:  # may lie in memory that this graph works in
                _overwrite(later)
            for old, new in zip(results, code(list(places)), strict=True):
                if _memory(old) != _memory(new):
                    old.untyped_storage().copy_(new.untyped_storage())

        _overwrite(own)
        self.graphs.add(replay)
        return replay, results

    def follow(self) -> None:
        pass


class Counted:
    """The graphs of a GPU, and how often they are launched."""

    def __init__(self) -> None:
        self.device: Any = None
        self.captures = self.replays = 0

    def capture(
        self, code: Any, inputs: list[Tensor], *, leaves: bool
    ) -> tuple[Callable[[], None], list[Tensor]]:
        replay, results = self.device.capture(code, inputs, leaves=leaves)
        self.captures += 1

        def counted() -> None:
            self.replays += 1
            replay()

        return counted, results

    def follow(self) -> None:
        self.device.follow()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overwrite(results: Sequence[Tensor]) -> None:
    for result in results:
        if result.is_floating_point():
            result.fill_(torch.nan)


def _at_address(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, which does not hold it."""
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(inside.own_storage(tensor), 0, tensor.shape, tensor.stride())


class Net(nn.Module):
    """Two results; statistics that change; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.after(self.before(x))
        return self.head(hidden), hidden.mean(0)


def model(
    graphs: Any = None, device: str = "cpu", make: Callable[[], nn.Module] = Net, **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    options = {"device": device, "lowering": "inductor", "gpu_memory": "1GiB", **options}
    made = megacompile(make(), cuda_graphs=graphs is not None, **options)
    if isinstance(graphs, Counted):
        graphs.device = inside.machine(made).graphs
    inside.machine(made).graphs = graphs
    return made


Loop = Callable[[Any, Any, list[Tensor]], list[Tensor]]  # up to the step


def step(loop: Loop, net: Any, optimizer: Any, *batch: Tensor) -> list[Tensor]:
    found = loop(net, optimizer, [*batch])
    optimizer.step()
    optimizer.zero_grad(set_to_none=loop is not fills_gradients_with_zeros)
    return found


def usual(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    y, mean = net(batch[0])
    loss = y.square().mean() + mean.sum()
    loss.backward()
    return [y, mean, loss]


def accumulates(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """The gradients of the first call are held while those of the second are made."""
    losses = []
    for x in batch:
        losses.append(net(x)[0].square().mean())
        losses[-1].backward()
    return losses


def two_forwards(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """What the first forward has saved waits while the second one runs."""
    (first, mean), (second, other) = map(net, batch)
    loss = (first * second.detach()).mean() + second.square().mean() + (mean + other).sum()
    loss.backward()
    return [first, second]


def two_forwards_in_the_end(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """A captured backward meets what a forward has saved that was no replay."""
    steps = optimizer.state[net.head.weight].get("step", 0)
    return (usual if steps < SETTLED else two_forwards)(net, optimizer, batch)


def keeps_the_graph(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    loss = net(batch[0])[0].square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def holds_gradients(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """The user has the gradients of the step before, and those of `autograd.grad`."""
    x = batch[0].requires_grad_()
    of_x, of_head = torch.autograd.grad(net(x)[0].square().mean(), [x, net.head.weight])
    net(batch[1])[0].square().mean().backward()
    found = [p.grad for p in net.parameters()]
    return [of_x, of_head, *found]


def fills_gradients_with_zeros(net: Any, optimizer: Any, batch: Any) -> list[Tensor]:
    """Instead of None, behind the step."""
    net(batch[0])[0].square().mean().backward()
    return []


def clips(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    net(batch[0])[0].square().mean().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    return [norm]


def evaluates_before_the_backward(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """What the forward has saved waits while a graph runs that was captured before it."""
    found: list[Tensor] = []

    def evaluate() -> None:
        net.eval()
        with torch.no_grad():
            found.extend(net(batch[1]))
        net.train()

    evaluate()
    y, mean = net(batch[0])
    evaluate()
    (y.square().mean() + mean.sum()).backward()
    return [y, mean, *found]


def leaves_memory_out(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """Inputs whose strides a plain copy does not have."""
    wide = torch.zeros(8, 32, device=batch[0].device)
    wide[:, ::2] = batch[0]
    return usual(net, optimizer, [wide[:, ::2]])


def expands(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """Inputs that have an element in several places."""
    return usual(net, optimizer, [batch[0][:, :1].expand(8, 16)])


def replaces_a_parameter(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    steps = optimizer.state[net.head.weight].get("step", 0)
    if steps == SETTLED + 1:
        net.head.weight.data = net.head.weight.data.clone().mul_(0.9)
    return usual(net, optimizer, batch)


def changes_an_output(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    y, mean = net(batch[0])
    y.mul_(2)
    mean.add_(1)
    (y.square().mean() + mean.square().sum()).backward()
    return [y, mean]


def other_sizes(net: Any, optimizer: Any, batch: list[Tensor]) -> list[Tensor]:
    """Some batches are smaller. The code for all sizes is captured for those that come again."""
    steps = optimizer.state[net.head.weight].get("step", 0)
    return usual(net, optimizer, [x[:5].clone() for x in batch] if steps in (2, SETTLED) else batch)


LOOPS = [
    *(usual, accumulates, two_forwards, two_forwards_in_the_end, keeps_the_graph, holds_gradients),
    *(fills_gradients_with_zeros, clips, evaluates_before_the_backward, leaves_memory_out),
    *(replaces_a_parameter, changes_an_output, other_sizes),
]


def trained(net: nn.Module, loop: Loop, device: str = "cpu") -> list[Tensor]:
    """What the steps of a loop return, as it is after the last one; then parameters, buffers."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for _ in range(STEPS):
        found += step(loop, net, optimizer, *(torch.randn(8, 16, device=device) for _ in range(2)))
    return [*found, *net.state_dict().values()]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_replays_change_nothing(loop: Loop) -> None:
    emulated = Emulated()
    plain, ours = trained(model(), loop), trained(model(emulated), loop)
    assert emulated.replays > 0
    assert [k for k, (a, b) in enumerate(zip(plain, ours, strict=True)) if not a.equal(b)] == []


def parts() -> Any:
    """Its results leave memory out, or have an element in several places."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = m.before(x).tanh()
        part, mean = hidden[:, ::2], m.head(hidden).mean(0, keepdim=True).expand(8, 4)
        torch._dynamo.graph_break()
        return m.head(torch.cat([part, part], 1)), mean, part

    return Applies(forward, before=nn.Linear(16, 32), head=nn.Linear(32, 4))


@pytest.mark.filterwarnings("ignore")
def test_results_have_the_strides_of_the_code() -> None:
    found = []
    for emulated in (None, Emulated()):
        net = model(emulated, make=parts)
        torch.manual_seed(1)
        for _ in range(STEPS):
            found.append(net(torch.randn(8, 16)))
            torch.stack([y.square().mean() for y in found[-1]]).sum().backward()
            for param in net.parameters():
                param.grad = None
    assert emulated is not None and emulated.replays > 0
    for plain, ours in zip(found[:STEPS], found[STEPS:], strict=True):
        assert all(map(torch.equal, plain, ours))
        assert [y.stride() for y in plain] == [y.stride() for y in ours]


@pytest.mark.filterwarnings("ignore")
def test_a_result_that_is_held_for_good_does_not_end_replays() -> None:
    """After a while the code is captured again, in other memory."""
    emulated = Emulated()
    net = model(emulated)
    held = [net(torch.randn(8, 16)) for _ in range(SETTLED)]  # no backward comes
    assert held
    for _ in range(80):
        net(torch.randn(8, 16))
    before = emulated.replays
    for _ in range(3):
        net(torch.randn(8, 16))
    assert emulated.replays - before == 3


@pytest.fixture
def waits_for_code() -> Iterator[None]:
    """No stage runs uncompiled until its code is there: that rounds otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_replays_change_nothing_on_a_gpu(loop: Loop, waits_for_code: None) -> None:
    graphs = Counted()
    plain = trained(model(device="cuda"), loop, "cuda")
    ours = trained(model(graphs, device="cuda"), loop, "cuda")
    assert graphs.replays > 0
    assert [k for k, (a, b) in enumerate(zip(plain, ours, strict=True)) if not a.equal(b)] == []


def test_each_call_is_a_replay_in_the_end() -> None:
    emulated = Emulated()
    net = model(emulated)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(SETTLED):
        step(usual, net, optimizer, torch.randn(8, 16))
    before, held = emulated.replays, []
    for _ in range(3):
        held += step(usual, net, optimizer, torch.randn(8, 16))
    assert emulated.replays - before == 2 * 3
    assert emulated.captures == 2


def test_there_are_no_more_graphs_than_the_device_holds() -> None:
    """Each set of sizes gets its own code here, and would get its own graphs."""
    emulated = Emulated()
    net = model(emulated, dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters())
    for rows in range(8, 13):
        for _ in range(SETTLED):
            step(usual, net, optimizer, torch.randn(rows, 16))
        assert 0 < len(emulated.graphs) <= 2 * 4
    assert emulated.captures == 2 * 5
    del net, optimizer
    gc.collect()
    assert not emulated.graphs


def test_a_larger_plan_takes_the_memory_of_graphs() -> None:
    emulated = Emulated()
    net = model(emulated, dynamic=False, gpu_memory="100KiB")
    optimizer = torch.optim.AdamW(net.parameters())
    for rows, graphs in ((8, 2), (48, 0), (8, 2)):
        for k in range(SETTLED):
            step(usual, net, optimizer, torch.randn(rows, 16))
            assert k or rows == 8 or not emulated.graphs
        assert len(emulated.graphs) == graphs, rows


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, AssertionError])
def test_code_that_cannot_be_captured_runs(kind: type[Exception]) -> None:
    emulated = Emulated(fails=kind("operation not permitted when stream is capturing"))
    plain, ours = trained(model(), usual), trained(model(emulated), usual)
    assert emulated.captures == 0
    assert all(map(torch.equal, plain, ours))


@pytest.mark.filterwarnings("ignore")
def test_code_with_an_expanded_input_runs() -> None:
    """Nothing could be copied to the memory of the graph."""
    plain, ours = trained(model(), expands), trained(model(Emulated()), expands)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        ({"gpu_memory": "24KiB"}, False),  # it fits; with what graphs keep it does not
        ({"activations": "recompute"}, False),
        ({"dynamic": True}, True),
    ],
    ids=str,
)
def test_the_plan_says_what_is_captured(options: dict[str, Any], captured: bool) -> None:
    options = {"device": "cpu", "lowering": "inductor", "gpu_memory": "1GiB", **options}
    net = megacompile(Net(), **options)
    net(torch.randn(8, 16))[0].sum().backward()
    assert ("captured as CUDA graphs" in str(explain(net))) is captured
