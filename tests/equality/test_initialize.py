"""Models on meta: schedules as of the model in memory, and the numbers of its own code.

They get the numbers that their own code would draw, or are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import HostMemoryError, ModelError, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests import inside
from tests.checkpoints import Net, on_meta, values
from tests.equality import cells
from tests.equality.nets import from_config, in_a_row
from tests.zoo import unlike

transformers = pytest.importorskip("transformers")


def seeded(model: nn.Module) -> Any:
    torch.manual_seed(5)
    return megacompile(model, device="cpu")


def built(make: Any = Net) -> Any:
    torch.manual_seed(5)
    return make()


def several() -> nn.Module:
    attention, recurrent = nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)
    others = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3), nn.Bilinear(2, 3, 4)
    return nn.ModuleList([attention, recurrent, *others])


def test_numbers_are_those_of_the_constructor_where_it_draws_in_resets_alone() -> None:
    plain, model = built(lambda: Net(tied=False)), seeded(on_meta(tied=False))
    assert unlike(values(plain), values(model)) == []
    after = torch.rand(1)
    built(lambda: Net(tied=False))
    assert torch.equal(torch.rand(1), after)  # as many were drawn
    assert unlike(values(built(several)), values(seeded(on_meta(several)))) == []


@pytest.mark.parametrize("name", ["tied", "yarn"])
def test_models_of_transformers(name: str) -> None:
    """As `to_empty` and `initialize_weights`; buffers as in a model that was built in memory."""
    plain = from_config(name)
    reference = on_meta(from_config, name=name).to_empty(device="cpu")
    reference.tie_weights()
    torch.manual_seed(5)
    reference.initialize_weights()
    model = seeded(on_meta(from_config, name=name))
    assert unlike(dict(reference.named_parameters()), dict(model.named_parameters())) == []
    assert unlike(dict(plain.named_buffers()), dict(model.named_buffers())) == []
    assert not any(hasattr(param, "_is_hf_initialized") for param in model.parameters())
    if name == "tied":
        plain.load_state_dict(model.state_dict())
        tokens = torch.arange(8)[None]
        expected = plain(input_ids=tokens, labels=tokens).loss
        assert torch.equal(expected, model(input_ids=tokens, labels=tokens).loss)
        moved = from_config(name).to("meta")  # which makes parameters of their own of tied ones
        first, second = moved.get_input_embeddings(), moved.get_output_embeddings()
        seeded(moved)
        assert second.weight is first.weight
        assert unlike(values(model), values(moved)) == []


class Titan(nn.Module):
    """`init_weights` of the outermost, which makes a buffer anew and a parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4, dtype=torch.complex64), persistent=False)

    def init_weights(self, device: torch.device | None = None) -> None:
        nn.init.trunc_normal_(self.inner.weight)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.table = torch.polar(torch.ones(4), torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * self.table.real


def test_init_weights_of_the_outermost_module() -> None:
    model = on_meta(Titan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seeded(model)
    assert model.scale is optimizer.param_groups[0]["params"][0]
    assert model.scale.tolist() == [2.0] * 4
    assert torch.equal(model.table, torch.polar(torch.ones(4), torch.arange(4.0)))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert model.scale.tolist() != [2.0] * 4


class Lost(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gamma = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Half(Lost):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gamma[:3] = 1
            self.mask.fill_(1)


@pytest.mark.parametrize(("make", "name"), [(Lost, "gamma, mask"), (Half, "gamma")])
def test_what_nobody_initializes_is_named(make: Any, name: str) -> None:
    model = on_meta(make)
    with pytest.raises(ModelError) as error:
        megacompile(model, device="cpu")
    assert name in str(error.value) and ("gamma, mask" in str(error.value)) == (make is Lost)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_part_may_be_in_memory() -> None:
    model = on_meta(Lost)
    model.gamma = gamma = nn.Parameter(torch.full((4,), 3.0))
    model.mask = torch.ones(4)
    seeded(model)
    assert model.gamma is gamma and gamma.tolist() == [3.0] * 4
    torch.manual_seed(5)
    assert torch.equal(model.inner.weight, nn.Linear(4, 4).weight)
    huge = on_meta(lambda: nn.Linear(2**20, 2**20))  # 4 TiB: seen before anything is made
    with pytest.raises(HostMemoryError):
        megacompile(huge, device="cpu")
    assert huge.weight.is_meta


class Partly(nn.Module):
    """Sets all of a parameter but for one number; of others than floats, nothing."""

    def __init__(self, dtype: torch.dtype, value: float, whole: bool) -> None:
        super().__init__()
        self.value, self.whole = value, whole
        self.weight = nn.Parameter(torch.empty(3, 5, dtype=dtype), requires_grad=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            some = -8 if self.weight.dtype in DTYPES else 0
            self.weight.view(torch.uint8).flatten()[: None if self.whole else some].fill_(0)
            if self.value:
                self.weight[0, 0] = self.value


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
OTHERS = (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
def test_what_is_unset_is_seen(dtype: torch.dtype) -> None:
    """Of every dtype; infinities and NaN are numbers too."""
    for value in (0.0, float("inf"), float("nan")) if dtype in DTYPES[:4] else (0.0,):
        model = on_meta(lambda value=value: Partly(dtype, value, True))
        seeded(model)
        assert not model.weight.is_meta
    with pytest.raises(ModelError, match="weight"):
        seeded(on_meta(lambda: Partly(dtype, 0.0, False)))


def actions(found: list[Schedule]) -> list[str]:
    return [ops.actions(graph) for schedule in found for graph in schedule.graphs.values()]


def broken(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = m.first(x).relu()
    torch._dynamo.graph_break()
    return nn.functional.mse_loss(m.last(x), y), x


@pytest.mark.parametrize("kind", ["tied", "adapters", "batch norm", "graph break"])
def test_the_schedule_is_the_one_that_runs(kind: str) -> None:
    """In everything but the history."""
    x, y = cells.data(kind, 1)
    breaks = kind == "graph break"
    make = partial(in_a_row, broken, width=cells.WIDTH) if breaks else partial(cells.Net, kind)
    found = [p.schedule() for p in inside.abstract(on_meta(make), (x,), {"y": y})]
    running = megacompile(make(), device="cpu", progress=False)
    for _ in range(1 + breaks):  # which outputs get a gradient is a guess in the first
        running.zero_grad()
        running(x, y=y)[0].backward()
    assert actions(schedules(running)) == actions(found) and len(found) == 1 + breaks
    for real, abstract in zip(schedules(running), found, strict=True):
        for name in ("slots", "buckets", "gradient_params", "saved_values"):
            assert getattr(real, name) == getattr(abstract, name)
        for mine, theirs in zip(real.templates, abstract.templates, strict=True):
            for name in ("saved", "primals", "gradient_metas"):
                assert getattr(mine, name) == getattr(theirs, name)


def test_the_model_is_left_as_it_was() -> None:
    """Also where it raises."""
    model, (x, y) = cells.Net("tied"), cells.data("tied", 1)
    before = {name: (id(p), p.clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    inside.abstract(model, (x, y))
    with pytest.raises(Exception, match="shape|size|dim"):
        inside.abstract(model, (x, torch.zeros(3)))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert model.head.weight is model.embed.weight and type(model.embed.weight.data) is Tensor
    assert torch.isfinite(model(x, y)[1]).all()


def test_no_memory_is_taken() -> None:
    """A model of 100 TiB. In a capture without gradients there is no backward."""
    wide = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(24)))
    x = torch.empty(4, 2**20, device="meta")
    (program,) = inside.abstract(wide, (x,))
    schedule = program.schedule()
    assert len(schedule.stages) == 24 and len(schedule.templates) <= 3
    with torch.no_grad():
        (program,) = inside.abstract(wide, (x,))
    assert program.schedule().backward is None
