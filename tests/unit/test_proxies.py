"""StreamedParameter, guarded gradients and DTensors: plain tensors to eager code.

A proxy is the host parameter. Gradients are served without a look, also where states are mixed. A
use of a DTensor of a rank waits for the update in flight.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW

from megacompile import compat, megacompile
from megacompile.errors import ModelError
from megacompile.runtime.params.gradient_guards import is_taken, is_unsummed, leave_unsummed, take
from megacompile.runtime.params.proxies import Link, ParamSource, StreamedParameter
from tests.equality.nets import in_a_row
from tests.processes import group_of_one
from tests.stateful.late import late
from tests.training import through_file
from tests.zoo import equal

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

CPU = torch.device("cpu")


def weight() -> Tensor:
    """(3, 4) f32, some negative."""
    return torch.linspace(-1, 2, 12).reshape(3, 4)


def pair() -> tuple[Tensor, Tensor, StreamedParameter]:
    """A plain tensor, an equal host tensor, and the proxy of that one."""
    host = weight()
    return weight(), host, StreamedParameter(host, CPU)


NOT_DIFFERENTIABLE = {
    *("item", "bool", "data", "len", "all close", "text", "shape", "list", "numpy")
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "both": lambda p: p * p,
    "matmul": lambda p: torch.ones(2, 3) @ p,
    "linear": lambda p: F.linear(torch.ones(2, 4), p),
    "embedding": lambda p: F.embedding(torch.tensor([2, 0]), p),
    "layer_norm": lambda p: F.layer_norm(p, (4,), p[0], p[1]),
    "transposed": lambda p: p.t() @ torch.ones(3, 2),
    "row": lambda p: p[1],
    "mask": lambda p: p[p > 0],
    "item": lambda p: p[0, 1].item(),
    "bool": lambda p: bool((p > 0).any()),
    "rows": lambda p: torch.stack(list(p)),
    "cat": lambda p: torch.cat([p, p.detach()]),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data * 2,
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "foreach": lambda p: torch._foreach_norm([p, p])[1],
    "len": len,
    "all close": lambda p: torch.allclose(p, p),
    "text": lambda p: str(p.detach() + 0),
    "shape": lambda p: (p.shape, p.numel(), p.dim(), p.size(1), p.is_floating_point()),
}


def test_reads_and_their_gradients_are_the_plain_ones() -> None:
    for (name, read), grad_enabled in itertools.product(READS.items(), (True, False)):
        plain, host, proxy = pair()
        for value in (plain, proxy):
            value.requires_grad_(name not in NOT_DIFFERENTIABLE)
        with torch.set_grad_enabled(grad_enabled):
            wanted, got = read(plain), read(proxy)
        if isinstance(wanted, Tensor):
            assert (got.stride(), got.dtype) == (wanted.stride(), wanted.dtype), name
            assert equal(wanted, got.clone()), name
        else:
            assert got == wanted, name
        assert equal(host, weight()), f"{name}: reading changes nothing"
        if plain.requires_grad and grad_enabled:
            for each in (wanted, got):
                each.square().sum().backward()
            assert plain.grad is not None
            assert equal(plain.grad, proxy.grad), name


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_ by itself": lambda p: p.mul_(p),
    "iadd": lambda p: p.__iadd__(2),
    "copy_": lambda p: p.copy_(torch.ones(3, 4)),
    "init": lambda p: nn.init.constant_(p, 3.0),
    "out": lambda p: torch.add(torch.ones(3, 4), 8, out=p),
    "mask assigned": lambda p: p.__setitem__(p > 0, 9.0),
    "index_copy_": lambda p: p.index_copy_(0, torch.tensor([1]), torch.ones(1, 4)),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "data assigned": lambda p: setattr(p, "data", torch.ones(3, 4)),
}
VIEW_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row assigned": lambda p: p.__setitem__(0, 9.0),
    "row": lambda p: p[1].fill_(9),
    "transposed": lambda p: p.t()[0].zero_(),
    "viewed": lambda p: p.view(-1).clamp_(-0.5, 0.5),
    "detached": lambda p: p.detach().mul_(2),
    "data": lambda p: p.data.clamp_(-0.5, 0.5),
}


def test_writes_reach_the_host_tensor() -> None:
    """Also through views; each is a new version, by which a pending backward sees it."""
    for name, write in (WRITES | VIEW_WRITES).items():
        plain, host, proxy = pair()
        before = host._version
        with torch.no_grad():
            wanted, got = write(plain), write(proxy)
        assert not equal(plain, weight()), f"{name} writes something"
        assert equal(plain, host), name
        if name in WRITES and isinstance(wanted, Tensor):
            assert got is proxy, "what gives itself in plain code does here"
        assert equal(plain + 0, proxy + 0), name
        assert host._version > before, name
        now = host._version
        _ = proxy + proxy[0] + proxy.detach().sum()
        assert host._version == now, "reading is none"


def test_an_export_by_a_c_function_gets_the_memory() -> None:
    _, host, proxy = pair()
    exports: Any = torch.utils.dlpack  # the stubs leave out `to_dlpack`
    for given in (proxy, proxy.detach()):
        exported = exports.from_dlpack(exports.to_dlpack(given))
        assert exported.data_ptr() == host.data_ptr() and equal(exported, host)


def test_data_of_another_shape_or_dtype_is_refused() -> None:
    """The schedule that runs could not take it."""
    for value in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64)):
        _, host, proxy = pair()
        with pytest.raises(ModelError, match="shape"):
            proxy.data = value
        assert equal(host, weight())


def track_fetches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """References to the copies that are made from now on."""
    found: list[weakref.ref[Tensor]] = []
    plain_to = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = plain_to(self, *args, **kwargs)
        if kwargs.get("copy"):
            found.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Tensor, "to", to)
    return found


def test_no_copy_outlives_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those of an operation that is differentiated: autograd saves the proxy."""
    fetched = track_fetches(monkeypatch)
    _, _, proxy = pair()
    torch.stack([proxy, proxy, proxy])
    assert len(fetched) == 1, "one copy serves all arguments of an operation"
    proxy.requires_grad_()
    loss = F.linear(torch.ones(2, 4), proxy).square().sum() + proxy.exp().sum() + proxy.sum()
    assert [copy() for copy in fetched] == [None] * 4
    loss.backward()
    with torch.no_grad():
        proxy.add_(1)
    assert len(fetched) > 4
    assert [copy() for copy in fetched] == [None] * len(fetched)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def copies(m: Any, x: Tensor) -> Tensor:
    """Deep-copies a layer, and saves all parameters, in the middle of the forward."""
    m.saved = through_file(m.state_dict())
    twin = copy.deepcopy(m.first)
    assert all(type(p) is nn.Parameter and p.is_leaf for p in twin.parameters())
    return twin(x)


def test_a_deep_copy_and_a_checkpoint_in_the_forward() -> None:
    plain = in_a_row(lambda m, x: m.last(copies(m, m.first(x))), saved=None)
    ours = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    x = torch.randn(3, 4)
    for model in (plain, ours):
        model(x).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert equal(p.grad, q.grad), name
        assert equal(ours.saved[name], p.detach()) and type(ours.saved[name]) is Tensor


def test_operators_that_read_get_no_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parameter lives on the device; those that write get a copy, which is written back.
    An operator may give what it got other memory: the parameter keeps its own."""
    fetched = track_fetches(monkeypatch)
    plain, host, proxy = pair()
    proxy.source = ParamSource(resident=True)
    for read in READS.values():
        read(proxy.detach())
    assert not fetched
    with torch.no_grad():
        proxy.t()[0].add_(plain[1, 0])
        plain.t()[0].add_(plain[1, 0].clone())
    assert equal(host, plain) and fetched
    gives_other_memory(proxy)
    assert equal(host, plain)


@torch.library.custom_op("megacompile_tests::gives_other_memory", mutates_args=())
def gives_other_memory(of: Tensor) -> Tensor:
    """As `_cudnn_rnn_flatten_weight`, which says nothing of it in its schema."""
    of.set_(torch.zeros_like(of))  # type: ignore[call-overload]
    return torch.ones(1)


def test_a_proxy_that_was_written_to_under_autograd_has_no_link_to_tell_of() -> None:
    param = nn.Parameter(weight())
    made = Link.apply(param, lambda: StreamedParameter(param.detach(), CPU))  # type: ignore[no-untyped-call]
    told: list[Any] = []
    made.source = ParamSource(used=lambda _, link: told.append(link))
    made.exp()
    made.mul_(2)
    made.exp()
    assert [link is None for link in told] == [False, False, True]


def test_gradients_that_are_taken_unsummed_and_plain_are_zeroed_together() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for param in params:
        param.grad = torch.tensor([3.0, 4.0])
    take(params[0], "a", lambda: (5.0,))
    leave_unsummed(params[1], "b")
    taken, *others = gradients = [cast(Tensor, param.grad) for param in params]
    assert is_taken(taken) and is_unsummed(others[0])
    compat.FOREACH_ZERO(gradients)
    assert is_taken(taken) and [each.tolist() for each in others] == [[0, 0]] * 2


USES: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "to_local": lambda p: p.to_local(),
    "an operator": lambda p: p + 1,
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "_local_tensor": lambda p: p._local_tensor,
    "a function": lambda p: torch.linalg.vector_norm(p),
    "detach": lambda p: p.detach(),
    "untyped_storage": lambda p: p.untyped_storage(),
}


def test_whoever_uses_a_guarded_dtensor_waits() -> None:
    with group_of_one(datetime.timedelta(seconds=20)):
        mesh = init_device_mesh("cpu", (1,))
        model = megacompile(nn.Sequential(nn.Linear(4, 3)), mesh=mesh, device="cpu")
        optimizer = AdamW(model.parameters(), lr=0.1)
        for _ in range(2):  # the first step makes the states
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        workers, param = late(model), cast(Any, model)[0].weight
        for name, use in USES.items():
            model(torch.ones(2, 4)).sum().backward()
            workers.finish()
            workers.waited.clear()
            optimizer.step()
            assert param.shape == (3, 4) and not workers.waited
            use(param)
            assert len(workers.waited) == 1 and type(param) is DTensor, name
        workers.finish()
