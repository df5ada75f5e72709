"""Loops that people write, over models of libraries: few captures, and the plain model's losses.

The loops are those of `python -m benchmarks.loops`, with tiny models. Lengths change from step to
step, the last batch of an epoch is smaller, calls in eval mode come between the steps.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.loops.catalogue import LOOPS
from benchmarks.loops.loop import Engine
from benchmarks.loops.measure import Measured, run
from tests.draws import drawn
from tests.zoo import equal

STEPS = 8
SETTLED = 4  # steps in which all that differs has come: lengths, a smaller batch, other calls

FAST = ("llama-varying", "gru-varying")  # a decoder, and what is captured in part
ON_GPU = (
    *FAST,
    *("llama-eval", "llama-lora", "bert-varying", "qwen3-moe-varying", "vit-last", "t5-varying"),
    *("whisper-labels", "llama-accumulated", "gemma3-varying", "convnext-last"),
)


def chosen(name: str) -> Any:
    """The loop; the test is skipped where a package of it is missing."""
    loop = LOOPS[name]
    for package in loop.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return loop


def assert_few_captures(ours: Measured, theirs: Measured) -> None:
    """No more graphs than torch.compile has, and no more late than it has."""
    graphs, programs = ours.graphs, [step.programs for step in ours.steps]
    why = "\n".join(line for step in ours.steps for line in step.why)
    said = f"graphs {graphs}, programs {programs}, torch.compile's {theirs.graphs}\n{why}"
    late = sum(theirs.graphs[SETTLED:])
    assert sum(graphs) <= sum(theirs.graphs), said
    assert sum(graphs[SETTLED:]) <= late, said
    assert sum(programs[SETTLED:]) <= late, said


@pytest.mark.parametrize("name", drawn(FAST, [name for name in LOOPS if name not in FAST]))
@pytest.mark.filterwarnings("ignore")
def test_few_captures_and_the_same_bits(name: str) -> None:
    loop = chosen(name)
    plain, compiled, ours = (
        run(loop, engine, size="least", steps=STEPS)
        for engine in (Engine.PLAIN, Engine.COMPILE, Engine.OURS)
    )
    # where transformers takes another kernel once it is captured, it does so for torch.compile too
    same = plain if compiled.losses == plain.losses else compiled
    assert ours.losses == same.losses
    pairs = zip(same.model.named_parameters(), ours.model.parameters(), strict=True)
    assert [key for (key, a), b in pairs if not equal(a.detach(), b.detach())] == []
    assert_few_captures(ours, compiled)


@pytest.mark.gpu(long=True)
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.filterwarnings("ignore")
def test_few_captures_with_inductor(name: str) -> None:
    """Losses are equal but for rounding. No element is dropped: Inductor draws other ones."""
    loop = chosen(name)
    options: dict[str, Any] = {"size": "least", "steps": STEPS, "device": "cuda"}
    random = torch._inductor.config.patch(fallback_random=True)
    with random, mock.patch("torch.nn.functional.dropout", lambda x, *_, **__: x):
        plain = run(loop, Engine.PLAIN, **options)
        ours = run(loop, Engine.OURS, lowering="inductor", **options)
    for mine, theirs in zip(plain.losses, ours.losses, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-2)
    assert_few_captures(ours, run(loop, Engine.COMPILE, **options))
