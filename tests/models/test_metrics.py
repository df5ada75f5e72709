"""`megacompile.metrics()`: what is counted, what is left out, and what loggers get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile as mc
from megacompile.errors import ModelError
from tests import inside
from tests.interrupts import Places, traced
from tests.zoo import Language

ROWS, LENGTH, WIDTH, WORDS = 3, 8, 16, 32


def words(kind: type[Language] = Language) -> Language:
    return kind(WORDS, WIDTH, [nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose steps are measured, and its optimizer."""
    model = mc.megacompile(words(), lowering="eager", device="cpu", **options)
    assert mc.metrics(model).step_s is None  # this starts it
    return model, torch.optim.AdamW(model.parameters())


def ids() -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH))


def train(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: int, calls: int = 1
) -> None:
    for _ in range(steps):
        for _ in range(calls):
            model(ids()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(ids())


@pytest.mark.parametrize("calls", [1, 2])
def test_rates_are_those_of_the_last_steps(calls: int) -> None:
    model, optimizer = made()
    train(model, [optimizer], 25, calls)
    found = mc.metrics(model)
    assert found.steps == 20
    assert found.step_s and found.tokens_s and found.samples_s and found.tflop_s
    per_step = found.tokens_s * found.step_s, found.samples_s * found.step_s
    assert per_step == pytest.approx((calls * ROWS * LENGTH, calls * ROWS))
    flops = 6 * sum(p.numel() for p in model.parameters())
    assert found.tflop_s * 1e12 / found.tokens_s == pytest.approx(flops)
    assert calls == 1 or found.predicted_s is None


def test_frozen_parameters_have_no_gradients_to_count() -> None:
    plain = words()
    plain.embed.requires_grad_(False)
    model = mc.megacompile(plain, lowering="eager", device="cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    mc.metrics(model)
    train(model, [optimizer], 4)
    found, total = mc.metrics(model), sum(p.numel() for p in model.parameters())
    assert found.tflop_s and found.tokens_s
    flops = 4 * total + 2 * sum(p.numel() for p in trained)
    assert found.tflop_s * 1e12 / found.tokens_s == pytest.approx(flops)


def test_steps_with_an_evaluation_are_left_out() -> None:
    model, optimizer = made()
    train(model, [optimizer], 6)
    evaluate(model)
    before = mc.metrics(model).steps
    train(model, [optimizer], 1)
    assert mc.metrics(model).steps == before
    train(model, [optimizer], 2)
    assert mc.metrics(model).steps == before + 2


def test_a_call_without_gradients_in_each_step_is_part_of_it() -> None:
    """A reference model that is the same one."""
    model, optimizer = made()
    for _ in range(6):
        evaluate(model)
        train(model, [optimizer], 1)
    found = mc.metrics(model)
    assert found.steps >= 3 and found.tokens_s and found.step_s
    assert found.tokens_s * found.step_s == pytest.approx(ROWS * LENGTH)


def test_two_optimizers_make_one_step() -> None:
    model = mc.megacompile(words(), lowering="eager", device="cpu")
    params = list(model.parameters())
    both = [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:])]
    mc.metrics(model)
    train(model, both, 2)
    before = mc.metrics(model).steps
    train(model, both, 4)
    assert mc.metrics(model).steps == before + 4


def test_waits_come_from_traced_steps_and_no_trace_of_the_user_is_replaced() -> None:
    model, optimizer = made()
    with mc.trace(model) as traced:
        train(model, [optimizer], 9)
    waits = mc.metrics(model).waits
    assert waits and all(0 <= share <= 1 for share in waits.values())
    assert sum(waits.values()) <= 1 + 1e-6
    assert mc.explain(model, changes=False).traced_step_s is not None
    assert len([run for run in traced.measured.runs if run.graph == "backward"]) == 9


def test_an_interrupt_leaves_no_trace_behind() -> None:
    """Wherever it comes in the step that begins one, later steps go on, and see their waits."""
    model, optimizer = made()
    train(model, [optimizer], 1)
    stopped = set[str]()
    for at in range(1, 90):  # most are in `Tracer`, for each op
        inside.machine(model).meter = None
        mc.metrics(model)
        train(model, [optimizer], 2)
        places = Places(at, "recorder")
        with contextlib.suppress(KeyboardInterrupt), traced(places):
            train(model, [optimizer], 1)
        if "Tracer.run" in places.stopped:
            break  # the update has begun, and is torn
        train(model, [optimizer], 7)
        assert inside.machine(model).tracer is None, places.stopped
        assert mc.metrics(model).waits, places.stopped
        stopped.add(places.stopped)
    assert any("__enter__" in place for place in stopped)


def test_no_trace_goes_on_through_an_evaluation() -> None:
    """It would keep the times of each op of it, and slow down each call behind the last step."""
    model, optimizer = made()
    train(model, [optimizer], 4)
    assert inside.machine(model).tracer is not None
    for _ in range(201):
        evaluate(model)
    assert inside.machine(model).tracer is None
    train(model, [optimizer], 9)
    assert not mc.metrics(model).waits


def test_memory_is_what_is_held_and_its_peak(tmp_path: Path) -> None:
    model, optimizer = made(disk=str(tmp_path), host_memory="200KiB")
    train(model, [optimizer], 3)
    memory = mc.metrics(model).memory
    assert set(memory) == {"host", "disk"}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert memory["host"].peak_bytes >= memory["host"].now_bytes >= size
    assert memory["disk"].peak_bytes >= memory["disk"].now_bytes >= 0


def test_loggers_get_flat_numbers_and_people_a_line() -> None:
    model, optimizer = made()
    assert str(mc.metrics(model)).startswith("no step measured yet")
    train(model, [optimizer], 9)
    found = mc.metrics(model)
    flat = found.to_dict()
    assert all(isinstance(value, (int, float)) for value in flat.values())
    assert {"steps", "step_s", "tokens_s", "tflop_s", "memory/host_peak_bytes"} <= flat.keys()
    assert "a step" in str(found) and "\n" not in str(found)


def test_a_plain_model_has_none() -> None:
    with pytest.raises(ModelError):
        mc.metrics(words())


def test_a_trainer_logs_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    seen: list[dict[str, float]] = []

    class Report(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            seen.append(dict(logs))

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=ROWS,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = mc.megacompile(words(WithLoss), lowering="eager", device="cpu")
    rows = [{"ids": row} for row in torch.randint(WORDS, (24, LENGTH))]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[Report()]
    )
    mc.callbacks.for_trainer(trainer)
    trainer.train()
    logged = [logs for logs in seen if "loss" in logs]
    assert logged[-1]["megacompile/step_s"] > 0
    assert not any(name.startswith("megacompile/") for name in seen[-1])  # the summary
    with pytest.raises(ModelError):
        mc.callbacks.for_trainer(transformers.Trainer(model=words(WithLoss), args=arguments))


class WithLoss(Language):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(ids)}


@pytest.mark.parametrize("every", [2, 0])
def test_lightning_logs_them(tmp_path: Path, every: int) -> None:
    """At its own steps; 0: never."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = mc.megacompile(words(), lowering="eager", device="cpu")

        def training_step(self, batch: Tensor, at: int) -> Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=6,
        log_every_n_steps=every,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[mc.callbacks.for_lightning()],
        default_root_dir=tmp_path,
    )
    rows = torch.randint(WORDS, (8 * ROWS, LENGTH))
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, ROWS))  # type: ignore[arg-type]
    assert (trainer.logged_metrics.get("megacompile/step_s", 0) > 0) == bool(every)
