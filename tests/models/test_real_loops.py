"""Loops that people write, over models of libraries: few captures, and the plain model's losses.

The loops are those of `python -m benchmarks.loops`, with tiny models. Lengths change from step to
step, the last batch of an epoch is smaller, calls in eval mode come between the steps.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from benchmarks.loops.catalogue import LOOPS
from benchmarks.loops.loop import Engine
from benchmarks.loops.measure import Measured, run
from megacompile import megacompile
from megacompile.errors import OptimizerError
from tests import inside
from tests.draws import drawn
from tests.ranks.others import Classifier, Rows
from tests.zoo import assert_close, batch, equal, mixed

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
    """Losses are equal but for rounding. A missed update changes a loss by 4e-3."""
    loop = chosen(name)
    options: dict[str, Any] = {"size": "least", "steps": STEPS, "device": "cuda", "dropout": False}
    with torch._inductor.config.patch(fallback_random=True):
        plain = run(loop, Engine.PLAIN, **options)
        ours = run(loop, Engine.OURS, lowering="inductor", **options)
    for mine, theirs in zip(plain.losses, ours.losses, strict=True):
        assert theirs == pytest.approx(mine, rel=2e-3)
    assert_few_captures(ours, run(loop, Engine.COMPILE, **options))


OF_ACCUMULATION = 4


class GradientState:
    """Accelerate's, as far as it is read."""

    sync_gradients = True


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> type[GradientState]:
    """Accelerate's note whether the next backward is the last before a step."""
    module = types.ModuleType("accelerate.state")
    module.GradientState = GradientState  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    monkeypatch.setattr(GradientState, "sync_gradients", True)
    return GradientState


def pair(model: Any) -> list[tuple[Any, Any]]:
    """(plain, its optimizer), (megacompiled with its optimizer, that)."""
    models = model, copy.deepcopy(model)
    mine, theirs = (AdamW(each.parameters(), lr=0.01) for each in models)
    megacompile(models[1], device="cpu", lowering="eager", optimizer=theirs)
    return [(models[0], mine), (models[1], theirs)]


def test_the_update_comes_with_the_last(state: type[GradientState]) -> None:
    """One that was not announced: the step makes the update of what is on the host. One backward
    more than was announced is refused."""
    both = (plain, _), (streamed, _) = pair(mixed()[0])
    for i in range(OF_ACCUMULATION):
        for model, optimizer in both:
            for k in range(3):
                state.sync_gradients = k == 2
                weight = model.head.weight.detach().clone()
                (model(**batch(3 * i + k)) / 3).backward()
                changed = not torch.equal(model.head.weight.detach(), weight)
                assert changed == (model is streamed and k == 2)
            optimizer.step()
            optimizer.zero_grad()
    for i in range(OF_ACCUMULATION):
        state.sync_gradients = i % 2 == 0
        for model, optimizer in both:
            model(**batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(plain, streamed)
    state.sync_gradients = True
    streamed(**batch(0)).backward()
    with pytest.raises(OptimizerError):
        streamed(**batch(1)).backward()


def in_trainer(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> list[dict[str, Any]]:
    """The log of a Trainer with micro-batches, one of them left over at the end of an epoch."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        max_grad_norm=0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loop = Trainer(
        model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, scheduler)
    )
    loop.train()
    return [entry for entry in loop.state.log_history if "loss" in entry]


def test_a_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (plain, mine), (streamed, theirs) = pair(Classifier())
    wanted = in_trainer(plain, mine, tmp_path)
    found = in_trainer(streamed, theirs, tmp_path)
    assert len(wanted) == 12
    for entry, other in zip(wanted, found, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert_close(plain, streamed)
    assert inside.backends(streamed) == {"in the backward"}
