"""The update rules in plain torch, against torch.optim and lion-pytorch on plain tensors; 8-bit
blocks; stochastic rounding; and what is known of optimizers.

An update in parts: whole, in chunks and compiled, and in chunks that a device makes, the twin of an
optimizer's kernel is the same in every bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon

from megacompile import compat
from megacompile.runtime.optim import blockwise, twin
from megacompile.runtime.optim.blockwise import BlockwiseTensor, dequantize, dynamic_code, quantize
from megacompile.runtime.optim.rule import OptimizerRule, State, Update
from megacompile.runtime.optim.rules import KNOWN, RULES, known, rule_of
from megacompile.runtime.optim.twin import apply, philox, round_stochastic, seed_of
from megacompile.runtime.updates.compiled import CompileRequest
from megacompile.runtime.updates.workers import Chunks
from tests.draws import drawn
from tests.training import Lion
from tests.zoo import equal

NUMEL, STEPS = 5003, 10
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ADAM, SGD_RULE, LION = RULES
assert [rule.name for rule in RULES] == ["adam", "sgd", "lion"]


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(NUMEL).to(dtype) for _ in range(STEPS)]


def start(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(NUMEL).to(dtype)


def stock(kind: Any, given: Iterable[Tensor], dtype: torch.dtype, **options: Any) -> Any:
    """(the parameter, its states, its group) after steps of an optimizer's own."""
    leaf = nn.Parameter(start(dtype))
    optimizer = kind([leaf], **({} if kind is Lion else {"foreach": False}), **options)
    for grad in given:
        leaf.grad = grad.clone()
        optimizer.step()
    return leaf.detach(), optimizer.state[leaf], optimizer.param_groups[0]


def by_rule(
    rule: OptimizerRule, group: Any, given: Iterable[Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, dict[str, State]]:
    """The same by the rule. What is in a momentum buffer before its first step does not matter."""
    param = start(dtype)
    made: list[State | None] = [None] * len(rule.moments)
    for i, moment in enumerate(rule.moments):
        if moment.option is None or group[moment.option]:
            made[i] = torch.full_like(param, torch.nan if rule is SGD_RULE else 0.0)
    for step, grad in enumerate(given, 1):
        hyper = rule.hyper(group, step=torch.tensor(float(step)), first=step == 1)
        apply(rule, Update(param, grad, tuple(made), hyper))
    found = zip((moment.name for moment in rule.moments), made, strict=True)
    return param, {name: value for name, value in found if value is not None}


LR = torch.tensor(1e-2, dtype=torch.float64)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2}),
    "adamw, lr in a tensor": (AdamW, {"lr": LR}),
    "adamw, maximize": (AdamW, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adamw, amsgrad": (AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "adam, decay": (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam, all": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adam, decoupled": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (SGD, {"lr": 0.1}),
    "sgd, dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "sgd, nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion": (Lion, {"lr": 1e-2}),
    "lion, decay": (Lion, {"lr": 1e-2, "weight_decay": 0.3}),
    "lion, extreme betas": (Lion, {"lr": 1e-2, "betas": (0.0, 1.0)}),
}
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"]
)


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_its_optimizer(case: str, dtype: torch.dtype, tolerance: float) -> None:
    """The parameter and its states; of Lion the sign of what is nearly 0 may be another."""
    kind, options = CASES[case]
    given = gradients(dtype)
    want, states, group = stock(kind, given, dtype, **options)
    rule = rule_of(kind([nn.Parameter(start())], **options))
    assert rule is not None
    param, made = by_rule(rule, group, given, dtype)
    if rule is LION:
        flipped = (param - want).abs() > tolerance * want.abs().max()
        assert flipped.double().mean() <= 2e-3 and (param - want).abs().max() <= 0.25
    else:
        assert (param - want).abs().max() <= tolerance * want.abs().max()
    assert made.keys() == {name for name, value in states.items() if name != "step" and value.dim()}
    for name, value in made.items():
        assert isinstance(value, Tensor)
        assert torch.allclose(value, states[name], rtol=10 * tolerance, atol=10 * tolerance), name


def test_a_group_of_an_older_checkpoint() -> None:
    """It decays as Adam's, for it has not the option that AdamW is made with."""
    group = Adam([nn.Parameter(start())], lr=1e-2, weight_decay=0.1).param_groups[0]
    older = {name: value for name, value in group.items() if name != "decoupled_weight_decay"}
    assert list(ADAM.hyper(older, step=1)) == list(ADAM.hyper(group, step=1))


BOTH = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


@BOTH
def test_codes_are_the_nearest(signed: bool) -> None:
    """Those of torch.bucketize on the midpoints, at, just below and just above each too."""
    code = dynamic_code(signed)
    assert (code[1:] > code[:-1]).all() and (code == 0).sum() == 1 and code[-1] == 1
    for decade in range(7):  # of the published map
        low, high = 10.0 ** (decade - 7), 10.0 ** (decade - 6)
        inside = int(((code >= low) & (code < high)).sum())
        assert inside == (2**decade if signed else 2 ** (decade + 1))
    midpoints = (code[1:] + code[:-1]) / 2
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    near = [torch.nextafter(midpoints, up), torch.nextafter(midpoints, down)]
    others = [torch.rand(10**5) ** 6, torch.logspace(-40, 0, 10**4), torch.tensor([0.0, -0.0])]
    values = torch.cat([midpoints, *near, code, *others])
    values = torch.cat([values, -values]) if signed else values
    values = values.clamp(-1 if signed else 0, 1)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 255)).view(-1, 255)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)  # each block's absmax is 1
    codes, absmax = quantize(rows.flatten(), signed)
    assert (absmax == 1).all() and len(codes.unique()) == 256
    assert torch.equal(codes.long(), torch.bucketize(rows.flatten(), midpoints))


@BOTH
def test_a_round_trip_and_what_is_not_finite(signed: bool) -> None:
    """The error is within half of the widest gap of the map; zeros stay zeros; NaN and inf take
    their block along; small parameters have no blocks; to clear is to store zeros."""
    widest = torch.diff(dynamic_code(signed)).max() / 2
    for numel in (0, 1, 256, 257, 10**5 + 3):
        torch.manual_seed(numel)
        values = torch.randn(numel) * 10.0 ** torch.randint(-6, 3, (numel,))
        values = values if signed else values.abs()
        codes, absmax = quantize(values, signed)
        back = dequantize(codes, absmax, signed)
        assert codes.shape == values.shape == back.shape
        assert dequantize(codes, absmax, signed, BF16).dtype == BF16
        largest = absmax.repeat_interleave(blockwise.BLOCK)[:numel]
        assert ((back - values).abs() <= largest * widest * (1 + 1e-5)).all()
    values = torch.zeros(600)
    values[:256] = 1.0
    values[10] = 0.0
    codes, absmax = quantize(values, signed)
    assert absmax.tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(dequantize(codes, absmax, signed), values)
    for bad in (torch.nan, torch.inf):
        values = torch.ones(600)
        values[300] = bad
        finite = dequantize(*quantize(values, signed), signed).isfinite()
        assert not finite[256:512].any() and finite[:256].all() and finite[512:].all()
    assert [blockwise.quantizes(numel) for numel in (1, 4095, 4096, 10**6)] == [0, 0, 1, 1]
    cleared, stored = (
        BlockwiseTensor(
            torch.empty(600), codes.clone(), absmax.clone(), signed=signed, settle=lambda: None
        )
        for _ in range(2)
    )
    cleared.clear()
    stored.store(torch.zeros(600))
    assert torch.equal(cleared.codes, stored.codes)
    assert torch.equal(cleared.absmax, stored.absmax)


@pytest.mark.parametrize("flush", [False, True], ids=["", "denormals are flushed"])
@BOTH
def test_what_was_quantized_is_quantized_to_the_same(signed: bool, flush: bool) -> None:
    """Of all magnitudes, with a largest one of either sign, not finite ones and a short block."""
    torch.manual_seed(0)
    rows = torch.randn(2000, blockwise.BLOCK) * 10.0 ** -torch.rand(2000, blockwise.BLOCK).mul(8)
    rows = rows if signed else rows.abs()
    magnitudes = 10.0 ** torch.linspace(-37.9, 38, len(rows), dtype=torch.float64)
    rows = rows.double() / rows.double().abs().amax(1, keepdim=True) * magnitudes[:, None]
    bad = torch.randn(5, blockwise.BLOCK).abs()
    bad[0, 3] = bad[1, 7] = torch.inf
    bad[1, 8] = bad[2, 0] = torch.nan
    bad[3, 5], bad[4] = -torch.inf if signed else torch.inf, 0.0
    small = rows[:500].float() * 1e-7  # some are no normal numbers
    codes, absmax = quantize(torch.cat([rows.float(), small, bad]).flatten()[:-100], signed)
    torch.set_flush_denormal(flush)
    try:
        again, largest = quantize(dequantize(codes, absmax, signed), signed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(codes, again)
    assert torch.equal(absmax.view(torch.int32), largest.view(torch.int32))


def test_philox_is_the_published_one() -> None:
    """Its known answers for zeros (Random123's kat_vectors): the first word."""
    assert philox(0, torch.tensor([0])).tolist() == [0x6627E8D5]


def test_stochastic_rounding_takes_the_neighbours() -> None:
    """Only the two of a value, the nearer the likelier; what bf16 has stays."""
    torch.manual_seed(0)
    values = torch.randn(2**16)
    rounded = round_stochastic(values, torch.tensor(seed_of(1, 2, 3))).float()
    error = (rounded - values).abs()
    gap = 2.0 ** (values.abs().log2().floor() - 7)
    assert (error < gap).all()
    assert 0.3 < (error > gap / 2).double().mean() * 2 < 0.7
    assert abs(float(((rounded - values) / gap).double().mean())) < 4 * 0.5 / 2**8
    exact = values.bfloat16()
    assert torch.equal(round_stochastic(exact.float(), 9), exact)
    between = torch.full((4096,), 2.0 - 2.0**-9)  # a carry goes into the exponent
    assert set(round_stochastic(between, 1).tolist()) == {2.0 - 2.0**-7, 2.0}


def test_seeds_differ_by_everything() -> None:
    everything = itertools.product((0, 1, 2**63 + 5), range(20), range(10), range(2))
    seeds = {seed_of(*each) for each in everything}
    assert len(seeds) == 3 * 20 * 10 * 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_an_optimizer_is_known_by_its_very_class() -> None:
    class Mine(AdamW):
        """May do anything in its step."""

    class Another(torch.optim.Optimizer):
        """Has the name of one that is known, and another module."""

    Another.__name__ = Another.__qualname__ = "Lion"
    params = [nn.Parameter(torch.zeros(1))]
    assert rule_of(AdamW(params)) is ADAM and rule_of(Mine(params)) is None
    assert rule_of(Lion(params)) is LION and rule_of(Another(params, {})) is None
    muon = known(Muon)
    assert muon is not None and muon not in RULES
    classes = [kind for each in KNOWN for kind in each.types]
    assert len(classes) == len(set(classes)), "an optimizer has two rules"
    for rule in RULES:  # the kernel takes the states that there are for the first ones
        optional = [moment.option is not None for moment in rule.moments]
        assert optional == sorted(optional), rule.name


LITTLE = 5 * blockwise.BLOCK + 37
LARGE = twin.CHUNK + LITTLE
GROUP = AdamW([nn.Parameter(torch.zeros(1))], amsgrad=True).param_groups[0]
GROUP |= {"momentum": 0.9, "dampening": 0.1, "nesterov": True}


def update_of(
    rule: Any,
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype | str,
    *,
    numel: int = LARGE,
    copy: torch.dtype | None = None,
    seed: int | None = None,
) -> Any:
    generator = torch.Generator().manual_seed(0)

    def values(scale: float, dtype: torch.dtype = FP32) -> Tensor:
        return (torch.randn(numel, generator=generator) * scale).to(dtype)

    states: list[Any] = []
    for moment in rule.moments:
        value = values(1e-3) if moment.signed else values(1e-6).abs()
        states.append(quantize(value, moment.signed) if state == "int8" else value.to(state))
    return Update(
        param=values(0.02, param),
        grad=values(1e-3, grad),
        states=tuple(states),
        hyper=rule.hyper(GROUP, step=7, scale=0.731),
        copy=None if copy is None else torch.zeros(numel, dtype=copy),
        seed=seed,
    )


def whole(rule: Any, update: Any) -> Any:
    """What the twin makes of it at once."""
    with torch.no_grad():
        twin.function_of(rule)(*twin.arguments(update))
    return update


def differing(mine: Any, its: Any) -> list[str]:
    pairs = zip(mine.tensors(), its.tensors(), strict=True)
    return [name for (name, a), (_, b) in pairs if not equal(a, b)]


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_roots_are_those_of_the_processor(dtype: torch.dtype) -> None:
    """Of numbers of every size; `math.sqrt` is rounded correctly."""
    generator = torch.Generator().manual_seed(0)
    most = 120 if dtype == FP32 else 1000
    exponents = torch.randint(-most, most, (20_000,), generator=generator)
    x = torch.ldexp(1 + torch.rand(20_000, dtype=dtype, generator=generator), exponents.to(dtype))
    wanted = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=FP64).to(dtype)
    assert equal(twin.sqrt(x), wanted)
    special = torch.tensor([0.0, math.inf, math.nan], dtype=dtype)
    assert equal(twin.sqrt(special), special)


@pytest.mark.parametrize(
    ("param", "grad", "state", "options"),
    [
        (FP32, BF16, FP32, {"copy": BF16}),
        (FP32, FP32, "int8", {}),
        (BF16, BF16, FP32, {"seed": 12345}),
        (FP64, FP64, FP64, {}),
    ],
    ids=str,
)
def test_chunks_are_the_whole(param: Any, grad: Any, state: Any, options: Any) -> None:
    for rule in RULES:
        one, chunked = (update_of(rule, param, grad, state, **options) for _ in range(2))
        apply(rule, chunked)
        assert differing(whole(rule, one), chunked) == [], rule.name


@pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "dtypes", drawn([(BF16, FP32)], [(FP32, FP32), (FP64, FP64), (FP16, FP16)]), ids=str
)
def test_compiled_adam_is_the_twin_in_every_bit(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Only its root is rounded otherwise by torch. bfloat16 is rounded stochastically."""
    param, state = dtypes

    def given(numel: int) -> Any:
        seed = 12345 if param is BF16 else None
        return update_of(ADAM, param, param, state, numel=numel, seed=seed)

    mine, its = (given(LITTLE) for _ in range(2))
    typical = twin.arguments(given(2**16))
    options = {"cpp_wrapper": True}
    compiled = compat.compiled_function(twin.function_of(ADAM), typical, {}, options)
    for _ in range(3):
        with torch.no_grad():
            compiled(*twin.arguments(mine))
        apply(ADAM, its)
    assert differing(mine, its) == []


def chunks_of(
    monkeypatch: pytest.MonkeyPatch, buffers: int, size_bytes: int
) -> tuple[Chunks, list[str]]:
    """Chunks on streams of the CPU, and what was waited for and begun."""
    log: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            self.k = sum(entry.startswith("begin") for entry in log)

        def record(self) -> None:
            log.append(f"begin {self.k}")

        def synchronize(self) -> None:
            log.append(f"end {self.k}")

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    streams: Any = SimpleNamespace()
    nothing = dict.fromkeys(("wait_event", "wait_stream"), lambda other: None)
    for name in ("h2d", "compute", "d2h"):
        wait = functools.partial(log.append, name)
        setattr(streams, name, SimpleNamespace(synchronize=wait, **nothing))
    here = Chunks.__new__(Chunks)
    here.streams, here.device, here.ours = streams, torch.device("cpu"), None
    here.buffer_bytes = size_bytes
    here.buffers = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(buffers)]
    return here, log


@pytest.mark.parametrize(
    ("rule", "state", "copy"), [(ADAM, FP32, BF16), (ADAM, "int8", None), (SGD_RULE, FP32, None)]
)
def test_pieces_make_the_same_update(
    monkeypatch: pytest.MonkeyPatch, rule: Any, state: Any, copy: Any
) -> None:
    apart, one = (update_of(rule, FP32, BF16, state, numel=100_003, copy=copy) for _ in range(2))
    here, log = chunks_of(monkeypatch, 2, 2**18)
    here.update(rule, [apart])
    assert differing(apart, whole(rule, one)) == []
    assert log.count("end 0") == 1 and "begin 1" in log


def test_an_update_begins_while_the_one_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit states are updated parameter by parameter: the link would be idle between two. A piece
    that fails is waited for: a copy into its buffer may be under way."""
    small = [update_of(SGD_RULE, FP32, BF16, FP32, numel=4096, copy=BF16) for _ in range(3)]
    here, log = chunks_of(monkeypatch, 2, 2**20)
    here.update(SGD_RULE, small)
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 2", "end 1"]
    log.clear()
    rule: Any = object()  # no rule: no such kernel
    with pytest.raises(AttributeError):
        here.update(rule, small[:1])
    assert log == ["h2d", "compute", "d2h"]


def test_code_that_is_compiled_is_of_one_kind_of_update(tmp_path: Path) -> None:
    """A file notes that it is; another kind has a note of its own."""
    updates = [update_of(ADAM, param, FP32, FP32, numel=blockwise.BLOCK) for param in (FP32, BF16)]
    assert len({CompileRequest.of(ADAM, each, tmp_path).note for each in updates}) == 2
