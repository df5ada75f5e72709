"""`ir`: the vocabulary of ops, schedules and their copies, where parameters lie, what metas say.

`find_units` and `make_plan`: which subtrees of the module tree become buckets, and which stages are
kept fully or in half, recomputed, or wait on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.ir import ops
from megacompile.ir.buckets import ALIGNMENT_BYTES, Unit
from megacompile.ir.plan import Choice, Plan, SavedPart
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.stages.units import find_units
from megacompile.verify.proof import verify
from tests.actions import apply, parse
from tests.capturing import capture, differentiated
from tests.checkpoints import layout_of
from tests.planned import PASSES, passed, planned, rows
from tests.zoo import Tower

TENSORS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.empty(5, 7).t(),
    "channels_last": lambda: torch.empty(4, 3, 2, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.empty(2, 3, 4).permute(2, 0, 1),
    "every second column": lambda: torch.empty(6, 10)[:, ::2],
    "rows of a larger one": lambda: torch.empty(9, 4)[2:5],
    "columns of a larger one": lambda: torch.empty(9, 4)[:, 1:3],
    "expanded": lambda: torch.empty(1, 4).expand(3, 4),
    "overlapping": lambda: torch.empty(8).as_strided((3, 4), (2, 1)),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.empty(()),
    "bf16": lambda: torch.empty(3, 5, dtype=torch.bfloat16),
    "bool": lambda: torch.empty(3, dtype=torch.bool),
    "complex": lambda: torch.empty(3, 2, dtype=torch.complex128),
}
DENSE = ("transposed", "channels_last", "permuted", "rows of a larger one")
SPARSE = ("every second column", "columns of a larger one", "expanded", "overlapping")


@pytest.mark.parametrize("name", TENSORS)
def test_places_are_dense_and_metas_make_what_they_are_of(name: str) -> None:
    """The elements of a place are its memory: none twice, no gap between them."""
    tensor = TENSORS[name]()
    (param,) = layout_of([tensor]).params
    assert (param.shape, param.dtype) == (tuple(tensor.shape), tensor.dtype)
    assert (param.numel, param.size_bytes) == (tensor.numel(), tensor.numel() * tensor.itemsize)
    flat = torch.arange(param.numel)
    assert flat.as_strided(param.shape, param.stride).unique().numel() == param.numel
    if name in DENSE:
        assert param.stride == tensor.stride()
    if name in SPARSE:
        assert param.stride == torch.empty(tensor.shape).stride(), "it becomes contiguous"
    meta = TensorMeta.of(tensor)
    assert TensorMeta.of(meta.empty()) == TensorMeta.of(meta.zeros()) == meta
    assert meta.size_bytes == tensor.numel() * tensor.itemsize
    if name != "overlapping":  # zero_() would not know in which order
        assert not meta.zeros().any()


def test_parameters_follow_each_other_aligned() -> None:
    tensors = [torch.empty(64), torch.empty(65), torch.empty(2, dtype=torch.float64)]
    bucket = layout_of(tensors, key=7)
    assert [param.offset_bytes for param in bucket.params] == [0, 256, 768]
    assert (bucket.size_bytes, bucket.key, bucket.name, bucket.label) == (1024, 7, "unit 7", "?")
    bucket = layout_of([torch.empty(0), torch.empty(()), torch.empty(3, 0, 2), torch.empty(4)])
    assert [param.offset_bytes for param in bucket.params] == [0, 0, 256, 256]
    assert bucket.size_bytes == 512 and layout_of([torch.empty(0)]).size_bytes == 0
    end = 0
    mixed = layout_of([make() for make in TENSORS.values()])
    for param in mixed.params:
        assert param.offset_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= param.offset_bytes - end < ALIGNMENT_BYTES
        end = param.offset_bytes + param.size_bytes
    assert end <= mixed.size_bytes < end + ALIGNMENT_BYTES


def test_leaves_of_metas_are_leaves_whatever_the_mode() -> None:
    meta = TensorMeta.of(nn.Parameter(torch.ones(2)))
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            assert all(t.requires_grad and t.is_leaf for t in (meta.empty(), meta.zeros()))
    assert TensorMeta.of(torch.empty(100, 100)[:2, :3]).size_bytes == 24, "a view's own"


KIB = 1024


def linear(kib: int) -> nn.Linear:
    """A linear layer of `kib` KiB, without a bias."""
    return nn.Linear(16, kib * KIB // 64, bias=False)


def tree(**children: nn.Module) -> nn.Module:
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def layers(count: int, kib: int = 1) -> nn.ModuleList:
    return nn.ModuleList(tree(up=linear(kib), down=linear(kib)) for _ in range(count))


def shown(units: Sequence[Unit]) -> str:
    """The units' names; "*" behind those that repeat."""
    return " | ".join(unit.bucket.name + "*" * unit.repeated for unit in units)


def params(unit: Unit) -> str:
    return " ".join(param.name for param in unit.bucket.params)


NESTED = tree(groups=nn.ModuleList(tree(layers=layers(2)) for _ in range(2)))
CASES: list[tuple[nn.Module, int | None, str]] = [  # with a limit in KiB
    (
        tree(embed=linear(8), layers=layers(2), norm=linear(1)),
        None,
        "embed | layers.0* | layers.1* | norm",
    ),
    (nn.Sequential(linear(1), nn.ReLU(), linear(1)), None, "0* | 2*"),
    (
        tree(experts=nn.ModuleDict({"a": linear(1), "b": linear(1)})),
        None,
        "experts.a* | experts.b*",
    ),
    (NESTED, None, "groups.0* | groups.1*"),  # the outermost container
    (  # an inner one where the outer child is over the limit
        NESTED,
        2,
        "groups.0.layers.0* | groups.0.layers.1* | groups.1.layers.0* | groups.1.layers.1*",
    ),
    # unlike children do not repeat; those of two kinds in turn do
    (nn.ModuleList([linear(1), nn.LayerNorm(256), tree(a=linear(1))]), None, "ModuleList"),
    (
        nn.ModuleList(m for _ in "ab" for m in (linear(1), nn.LayerNorm(16))),
        None,
        "0* | 1* | 2* | 3*",
    ),
    # all where nothing repeats, or the largest subtrees under the limit, or what cannot be cut
    (tree(a=linear(1), b=tree(c=linear(2))), None, "Module"),
    (
        tree(a=linear(4), b=tree(c=linear(2)), e=tree(f=linear(4), g=linear(4))),
        4,
        "a | b | e.f | e.g",
    ),
    (tree(embed=linear(8), head=linear(2)), 4, "embed | head"),
    # tiny neighbours join, and no layers join them
    (tree(a=linear(16), b=linear(1), c=layers(2), d=linear(15)), None, "a+b | c.0* | c.1* | d"),
    (tree(a=nn.LayerNorm(16), b=layers(2, kib=64), c=linear(1)), None, "a | b.0* | b.1* | c"),
    (tree(act=nn.ReLU(), fc=linear(1), drop=nn.Dropout()), None, "Module"),
    (nn.ReLU(), None, ""),
]


@pytest.mark.parametrize(("model", "limit", "units"), CASES)
def test_which_units(model: nn.Module, limit: int | None, units: str) -> None:
    options: dict[str, Any] = {} if limit is None else {"limit_bytes": limit * KIB}
    assert shown(find_units(model, **options)) == units


def test_parameters_that_are_nobodys_alone() -> None:
    """Tied: of the first module; listed twice: one unit; parameters of the root: a unit."""
    model = tree(embed=linear(8), layers=layers(2), head=linear(8))
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    units = find_units(model)
    assert shown(units) == "embed | layers.0* | layers.1*"
    assert params(units[0]) == "embed.weight"
    first, second = layers(2)
    model = tree(layers=nn.ModuleList([first, second, first]))
    model.register_parameter("position", nn.Parameter(torch.zeros(4, 4)))
    units = find_units(model)
    assert shown(units) == "Module | layers.0* | layers.1*"
    assert params(units[0]) == "position"
    assert not units[0].modules, "no module is within it: what uses the parameter is its stage"


def test_what_is_not_float32_is_not_cast() -> None:
    model = tree(a=linear(1), b=linear(1).double())
    (unit,) = find_units(model, compute_dtype=torch.bfloat16)
    assert [param.dtype for param in unit.bucket.params] == [torch.bfloat16, torch.float64]


CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"
LONG = "0F 1F 2F 3F 4F 5F 6F 7F | 7B 6B 5B 4B 3B 2B 1B 0B"
LAST_FROZEN = "0F 1F 2F | 1B 0B"


def plan(line: str, **given: Any) -> Plan:
    """What is chosen is one kept stage and a lookahead of one, if nothing else is said."""
    names = ("keep", "halves", "activations", "lookahead")
    default = {"keep": 1, "halves": False, "activations": "auto", "lookahead": 1}
    options = {name: given.pop(name, default[name]) for name in names}
    choice = Choice(options.pop("keep"), halves=options.pop("halves"))
    function = functools.partial(PASSES.make_plan, choice=choice, **options)
    return apply(function, parse(line, **given)).plan


def halved(plan: Plan) -> list[int]:
    return [i for i, row in enumerate(plan.stages) if row.saved is SavedPart.HALF]


@pytest.mark.parametrize(
    ("line", "given", "keep"),
    [
        (CHAIN, {}, {3}),
        (CHAIN, {"keep": 0}, set()),
        (CHAIN, {"keep": 3}, {1, 2, 3}),
        (CHAIN, {"keep": 9}, {0, 1, 2, 3}),
        ("0F 1F 2F", {}, set()),  # a forward alone
        (LAST_FROZEN, {"frozen": (2,), "keep": 2}, {0, 1}),
        ("0F 1F 2F 3F | 3B 2B 1B", {"activations": "keep", "frozen": (0,)}, {1, 2, 3}),
        (CHAIN, {"activations": "selective"}, {0, 1, 2, 3}),
        (CHAIN, {"keep": 3, "halves": True}, {1, 2, 3}),
    ],
)
def test_what_is_kept(line: str, given: dict[str, Any], keep: set[int]) -> None:
    """The last stages with a backward; with halves, all except the last one keep half."""
    made = plan(line, **given)
    assert made.keep == keep and not made.offload
    in_halves = given.get("halves") or given.get("activations") == "selective"
    halves = sorted(keep)[:-1] if in_halves else []
    assert halved(made) == halves
    assert plan(CHAIN) == plan(CHAIN, activations="recompute"), "the default"


@pytest.mark.parametrize(("lookahead", "offload"), [(1, {0, 1}), (2, {0}), (3, set()), (9, set())])
def test_the_first_stages_of_the_backward_stay_on_the_device(
    lookahead: int, offload: set[int]
) -> None:
    made = plan(CHAIN, activations="offload", lookahead=lookahead)
    assert made.offload == offload and made.keep == {3}
    guessed = plan(CHAIN, activations="offload", lookahead=lookahead, keep=0)
    assert not guessed.keep and guessed.offload == offload, "a backward of other outputs"


@pytest.mark.parametrize(
    ("count", "keep", "chosen"), [(2, 1, {1, 4}), (1, 4, {2}), (9, 5, {0, 1, 2})]
)
def test_stages_on_the_host_are_far_from_one_another(
    count: int, keep: int, chosen: set[int]
) -> None:
    """Before the kept stages and those that the backward begins with."""

    def on_host(count: int, lookahead: int) -> frozenset[int]:
        forward, *_ = LONG.partition(" |")
        saved: dict[str, Any] = {"keep": keep, "saved_on_host": count}
        return planned(forward, lookahead=lookahead, slots=lookahead + 1, **saved).plan.offload

    assert on_host(count, 1) == chosen
    assert not on_host(0, 1) and not on_host(count, 7)


def test_a_plan_keeps_half_of_what_stages_on_the_host_save() -> None:
    choice = Choice(2, saved_on_host=2)
    plan = PASSES.make_plan(parse(LONG), choice, lookahead=1).plan
    assert plan.keep == {1, 4, 6, 7}
    assert plan.offload == {1, 4}
    assert halved(plan) == [1, 4]
    assert plan.saved_delay == 3, "a copy has the time of three forwards"
    other = PASSES.make_plan(parse(LONG), choice, lookahead=1, saves=False).plan
    assert not other.keep and not halved(other), "a backward of other outputs"
    assert other.offload == plan.offload, "which finds the same on the host"


def test_what_stays_under_another_name_is_not_copied() -> None:
    """A relu saves its output. It is on the device for the next stage, or goes as its input."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
    graphs = differentiated(capture(Tower(layers), torch.randn(2, 4)))
    for on_host in (frozenset({1}), frozenset({1, 2})):
        plan = rows(6, on_host | {5}, offload=on_host)
        schedule = passed(graphs, lookahead=1, plan=plan)
        verify(schedule)
        of_stage = {stage.index: stage for stage in schedule.stages}
        assert of_stage[1].traced.saved, "there is what could be copied"
        copies = ops.nodes_of(schedule.forward, ops.offload_saved)
        names = [ops.arguments(copy)[1].name for copy in copies]
        assert any(name.startswith("s1_") for name in names) == (len(on_host) == 2)
