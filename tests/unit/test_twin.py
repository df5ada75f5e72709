"""An update in parts: the twin of an optimizer's kernel, whole, in chunks and compiled, and chunks
that a device makes, are the same in every bit."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile import compat
from megacompile.runtime.optim import twin as module
from megacompile.runtime.optim.blockwise import BLOCK
from megacompile.runtime.optim.rules import RULES
from megacompile.runtime.updates.compiled import CompileRequest
from megacompile.runtime.updates.workers import Chunks
from tests.draws import drawn
from tests.zoo import equal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TWIN: Any = module
ADAM, SGD, _ = RULES
LITTLE = 5 * BLOCK + 37
NUMEL = TWIN.CHUNK + LITTLE
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": True,
    "decoupled_weight_decay": True,
    "momentum": 0.9,
    "dampening": 0.1,
    "nesterov": True,
}


def update_of(
    rule: Any,
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype | str,
    *,
    numel: int = NUMEL,
    copy: torch.dtype | None = None,
    seed: int | None = None,
) -> Any:
    generator = torch.Generator().manual_seed(0)

    def values(scale: float, dtype: torch.dtype = FP32) -> Tensor:
        return (torch.randn(numel, generator=generator) * scale).to(dtype)

    states: list[Any] = []
    for moment in rule.moments:
        value = values(1e-3) if moment.signed else values(1e-6).abs()
        states.append(TWIN.quantize(value, moment.signed) if state == "int8" else value.to(state))
    return TWIN.Update(
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
        TWIN.function_of(rule)(*TWIN.arguments(update))
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
    assert equal(TWIN.sqrt(x), wanted)
    special = torch.tensor([0.0, math.inf, math.nan], dtype=dtype)
    assert equal(TWIN.sqrt(special), special)


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
        TWIN.apply(rule, chunked)
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
    typical = TWIN.arguments(given(2**16))
    options = {"cpp_wrapper": True}
    compiled = compat.compiled_function(TWIN.function_of(ADAM), typical, {}, options)
    for _ in range(3):
        with torch.no_grad():
            compiled(*TWIN.arguments(mine))
        TWIN.apply(ADAM, its)
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
    ("rule", "state", "copy"), [(ADAM, FP32, BF16), (ADAM, "int8", None), (SGD, FP32, None)]
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
    small = [update_of(SGD, FP32, BF16, FP32, numel=4096, copy=BF16) for _ in range(3)]
    here, log = chunks_of(monkeypatch, 2, 2**20)
    here.update(SGD, small)
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 2", "end 1"]
    log.clear()
    rule: Any = object()  # no rule: no such kernel
    with pytest.raises(AttributeError):
        here.update(rule, small[:1])
    assert log == ["h2d", "compute", "d2h"]


def test_code_that_is_compiled_is_of_one_kind_of_update(tmp_path: Path) -> None:
    """A file notes that it is; another kind has a note of its own."""
    updates = [update_of(ADAM, param, FP32, FP32, numel=BLOCK) for param in (FP32, BF16)]
    assert len({CompileRequest.of(ADAM, each, tmp_path).note for each in updates}) == 2
