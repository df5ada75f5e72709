"""Loops that libraries write: Trainer of transformers, adapters of PEFT."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.loops.loop import Family, Loop, Session, Size, supervised
from benchmarks.loops.texts import IGNORED, LLAMA, SECOND, ids, padded, varying


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of many lengths."""

    def __init__(self, size: Size, count: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.lengths = size.lengths(count, seed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = ids(self.size, 1, self.lengths[index], self.seed + index)[0]
        return {"input_ids": tokens, "labels": tokens}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, filled to its longest row."""
    pad = nn.utils.rnn.pad_sequence
    tokens = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED)
    return {"input_ids": tokens, "labels": labels, "attention_mask": (labels != IGNORED).long()}


def trainer(session: Session) -> None:
    """Trainer, which accumulates over two batches and evaluates every five steps."""
    library: Any = importlib.import_module("transformers")
    size = session.size
    losses: list[Any] = []

    class Noting(library.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    class Callback(library.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, *args: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            losses.append(metrics["eval_loss"])

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            session.done(*losses)
            losses.clear()

    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size.rows,
            per_device_eval_batch_size=size.rows,
            gradient_accumulation_steps=2,
            max_steps=session.steps,
            eval_strategy="steps",
            eval_steps=5,
            logging_steps=5,
            report_to=[],
            save_strategy="no",
            learning_rate=1e-3,
            disable_tqdm=True,
            use_cpu=session.device == "cpu",
        )
        rows = 9 * size.rows + 1  # the last batch has one row
        loop = Noting(
            model=session.prepare(LLAMA(size)),
            args=arguments,
            train_dataset=Texts(size, rows, 0),
            eval_dataset=Texts(size, 2 * size.rows + 1, 10_000),
            data_collator=collate,
            callbacks=[Callback()],
        )
        loop.remove_callback(library.trainer_callback.PrinterCallback)
        loop.train()


def adapted(size: Size) -> nn.Module:
    """Llama with adapters on the projections of attention."""
    library: Any = importlib.import_module("peft")
    config = library.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = library.get_peft_model(LLAMA(size), config)
    return model


def checkpointed(size: Size) -> nn.Module:
    """Llama with the activation checkpoints of transformers."""
    model: Any = LLAMA(size)
    model.gradient_checkpointing_enable()
    made: nn.Module = model
    return made


LOOPS = [
    Loop("llama-trainer", Family.DECODER, trainer, ("transformers", "accelerate")),
    Loop("llama-lora", Family.LORA, supervised(adapted, varying), ("transformers", "peft")),
    Loop("llama-checkpointed", Family.DECODER, supervised(checkpointed, padded), **SECOND),
]
