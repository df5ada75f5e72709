"""Checkpoints of the loops of others, of a model that two ranks share:
`torchrun ... -m tests.ranks.other_saves LOOP FOLDER cpu|cuda`.

A loop trains `STEPS` steps and saves after `SAVED` of them, by its own means. Another one, of a
model with other values, resumes from that. What each rank has of both goes to `FOLDER/RANK`, and
what the parameters were when they were saved.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megacompile import megacompile
from tests.ranks.here import Values, whole

STEPS, SAVED = 4, 2


class Tokens(Dataset[dict[str, Tensor]]):
    """64 rows of 8 tokens, which repeat after `period` rows."""

    def __init__(self, period: int = 64) -> None:
        self.period = period

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seed = index % self.period
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens}


def tied(seed: int, device: str, *, mesh: bool = True) -> Any:
    """A language model whose head is its embedding, and which has buffers; ranks share it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=33,  # which two ranks divide unequally
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config)
    if mesh:
        megacompile(model, mesh=init_device_mesh(device, (2,)))
    return model


def values(model: nn.Module) -> Values:
    """All of a model's parameters: a collective."""
    return {name: whole(param) for name, param in model.named_parameters()}


def states(optimizer: Any) -> list[Values]:
    """All of an optimizer's states, in the order of its parameters: a collective."""
    inner = getattr(optimizer, "optimizer", optimizer)
    params = [p for group in inner.param_groups for p in group["params"]]
    return [{key: whole(value) for key, value in inner.state[p].items()} for p in params]


def trainer(folder: Path, device: str) -> dict[str, Any]:
    """Its defaults save every 500 steps; here every second one, the optimizer too."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    found: dict[str, Any] = {}

    class Look(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == SAVED and "saved" not in found:
                found["saved"] = values(given["model"])

    def loop(seed: int) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=device == "cpu",
            ddp_backend="gloo" if device == "cpu" else None,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            save_steps=SAVED,
            logging_steps=1,
            report_to=[],
            learning_rate=0.01,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        model, data = tied(seed, device), Tokens()
        made = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Look()])
        return made

    first = loop(0)
    first.train()
    found["first"] = values(first.model), states(first.optimizer)
    first.save_model(str(folder / "model"))
    again = loop(1)
    again.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{SAVED}"))
    found["again"] = values(again.model), states(again.optimizer)
    return found


def accelerate(folder: Path, device: str) -> dict[str, Any]:
    """`save_state`, `load_state`, `save_model`, and `get_state_dict` for `save_pretrained`."""
    from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]

    found: dict[str, Any] = {}

    def loop(seed: int, *, resumes: bool) -> tuple[Any, Any]:
        accelerator = Accelerator(cpu=device == "cpu")
        model = tied(seed, device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        data: Any = DataLoader(Tokens(), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        if resumes:
            accelerator.load_state(str(folder / "state"))
            found["loaded"] = values(model)
        for step, batch in enumerate(data):
            if step < SAVED and resumes:
                continue
            if step == STEPS:
                break
            if step == SAVED and not resumes:
                found["saved"] = values(model)
                accelerator.save_state(str(folder / "state"))
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, str(folder / "model"))
        accelerator.unwrap_model(model).save_pretrained(
            str(folder / "pretrained"),
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
        accelerator.free_memory()
        return values(model), states(optimizer)

    found["first"] = loop(0, resumes=False)
    found["again"] = loop(1, resumes=True)
    return found


def lightning(folder: Path, device: str) -> dict[str, Any]:
    """`ModelCheckpoint`, of a module that Lightning wraps in a DistributedDataParallel."""
    import lightning as library  # type: ignore[import-not-found,unused-ignore]
    from lightning.pytorch.callbacks import (  # type: ignore[import-not-found,unused-ignore]
        ModelCheckpoint,
    )

    found: dict[str, Any] = {}

    class Module(library.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.model = tied(seed, device)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if self.global_step == SAVED and "saved" not in found:
                found["saved"] = values(self.model)
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def loop(seed: int, resume: Path | None) -> tuple[Any, Any]:
        saves = ModelCheckpoint(
            folder / "out", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1
        )
        made = library.Trainer(
            accelerator=device,
            strategy="ddp",
            devices=2,
            max_steps=STEPS,
            logger=False,
            callbacks=[saves],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = Module(seed)
        rows = Tokens(2)  # who resumes begins at the first batch
        sampler: Any = DistributedSampler(rows, 2, int(os.environ["RANK"]), shuffle=False)
        data = DataLoader(rows, batch_size=4, sampler=sampler)
        made.fit(module, data, ckpt_path=resume, weights_only=False)
        return values(module.model), states(made.optimizers[0])

    found["first"] = loop(0, None)
    found["again"] = loop(1, folder / "out" / f"step={SAVED}.ckpt")
    return found


LOOPS = {"trainer": trainer, "accelerate": accelerate, "lightning": lightning}


def main(name: str, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    found = LOOPS[name](folder, device)
    torch.save(found, folder / os.environ["RANK"])
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
