"""The loops of others, unchanged: Trainer, Accelerate, PEFT, Lightning, `generate()`.

Each trains the same model plain and streamed and compares the losses. Those of its packages that
are not there are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megacompile import megacompile
from tests.zoo import hf_qwen2

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
Prepare = Callable[[nn.Module], nn.Module]
STEPS = 5


class Tokens(Dataset[dict[str, Tensor]]):
    """64 rows of 64 random tokens, their own labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 1024, (64,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def qwen2() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return hf_qwen2(**sizes, **heads, vocab_size=1024)


def trainer(prepare: Prepare, folder: Path) -> list[float]:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    loop = Trainer(model=prepare(qwen2()), args=arguments, train_dataset=Tokens())
    loop.train()
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


def accelerate(prepare: Prepare, folder: Path) -> list[float]:
    accelerator = pytest.importorskip("accelerate").Accelerator()
    model = prepare(qwen2())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(Tokens(), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _, batch in zip(range(STEPS), data, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def peft(prepare: Prepare, folder: Path) -> list[float]:
    library = pytest.importorskip("peft")
    config = library.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = prepare(library.get_peft_model(qwen2(), config).cuda())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = next(iter(DataLoader(Tokens(), batch_size=4)))
    losses = []
    for _ in range(STEPS):
        loss = model(**{key: value.cuda() for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lightning(prepare: Prepare, folder: Path) -> list[float]:
    library = pytest.importorskip("lightning")
    losses: list[float] = []

    class Module(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = prepare(qwen2())

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    loop = library.Trainer(
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loop.fit(Module(), DataLoader(Tokens(), batch_size=4))
    return losses


def generate(prepare: Prepare, folder: Path) -> list[float]:
    model: Any = prepare(qwen2().eval().cuda())
    prompt = torch.arange(5, device="cuda")[None]
    return [float(t) for t in model.generate(prompt, max_new_tokens=6, do_sample=False)[0]]


@pytest.mark.parametrize("loop", [trainer, accelerate, peft, lightning, generate])
@pytest.mark.filterwarnings("ignore:megacompile. parameters stay in host memory")
def test_same_losses(loop: Callable[[Prepare, Path], list[float]], tmp_path: Path) -> None:
    plain = loop(lambda model: model, tmp_path)
    streamed = loop(megacompile, tmp_path)
    assert len(plain) >= STEPS
    assert streamed == pytest.approx(plain, rel=1e-4)
