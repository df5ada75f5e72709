"""Loops that accumulate by themselves, with `optimizer=`: the update comes with the last one."""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

from megacompile import megacompile
from megacompile.errors import OptimizerError
from tests import inside
from tests.torchrun_loops import Classifier, Rows
from tests.zoo import assert_close, batch, mixed

STEPS = 4


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
    for i in range(STEPS):
        for model, optimizer in both:
            for k in range(3):
                state.sync_gradients = k == 2
                weight = model.head.weight.detach().clone()
                (model(**batch(3 * i + k)) / 3).backward()
                changed = not torch.equal(model.head.weight.detach(), weight)
                assert changed == (model is streamed and k == 2)
            optimizer.step()
            optimizer.zero_grad()
    for i in range(STEPS):
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


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loop_of_accelerate(steps: int) -> None:
    library = pytest.importorskip("accelerate")
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    both = pair(Classifier())
    losses: list[list[float]] = [[], []]
    for (model, optimizer), found in zip(both, losses, strict=True):
        loader = DataLoader(Rows(), batch_size=4)
        prepared, wrapped, data = accelerator.prepare(model, optimizer, loader)
        for inputs in data:
            with accelerator.accumulate(prepared):
                loss = prepared(**inputs)["loss"]
                accelerator.backward(loss)
                wrapped.step()
                wrapped.zero_grad()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_close(both[0][0], both[1][0])
