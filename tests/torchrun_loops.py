"""The loops of others under torchrun: `torchrun ... -m tests.torchrun_loops LOOP FOLDER [mesh]`.

Trains a model plain and then megacompiled, each rank on rows of its own, and saves the losses and
the parameters of both into `FOLDER/RANK`. With `mesh`, ranks share the megacompiled model, and
nothing else of the loop changes; a DistributedDataParallel that it puts around passes through.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from megacompile import megacompile, schedules

STEPS = 4
WIDTH = 8


class Rows(Dataset[dict[str, Tensor]]):
    """64 rows of random numbers and a label."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(WIDTH, generator=generator),
            "labels": torch.randint(0, 4, (), generator=generator),
        }


class Classifier(nn.Module):
    """Gives its loss, as models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Normed(Classifier):
    """Has buffers, which a DistributedDataParallel sends from the first rank to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(self.norm(x), labels)


def is_shared(model: nn.Module) -> bool:
    """Do ranks share it?"""
    return any(hasattr(param, "full_tensor") for param in model.parameters())


def trainer(model: nn.Module, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        learning_rate=0.01,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    loop = Trainer(model=model, args=arguments, train_dataset=Rows())
    loop.train()
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]


def accelerate(model: nn.Module, folder: Path) -> list[float]:
    from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, optimizer, data = accelerator.prepare(
        model, optimizer, DataLoader(Rows(), batch_size=4)
    )
    losses = []
    for _, batch in zip(range(2 * STEPS), data, strict=False):
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lightning(model: nn.Module, folder: Path) -> list[float]:
    return in_lightning(model, folder, strategy="ddp")


def model_parallel(model: nn.Module, folder: Path) -> list[float]:
    from lightning.pytorch.strategies import (  # type: ignore[import-not-found,unused-ignore]
        ModelParallelStrategy,
    )

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return in_lightning(model, folder, strategy=strategy)


def in_lightning(model: nn.Module, folder: Path, *, strategy: Any) -> list[float]:
    import lightning as library  # type: ignore[import-not-found,unused-ignore]

    losses: list[float] = []

    class Module(library.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if strategy != "ddp" and not is_shared(self.model):
                megacompile(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    loop = library.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loop.fit(Module(), DataLoader(Rows(), batch_size=4))
    return losses


LOOPS = {
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "model_parallel": lightning,
}


def main(name: str, folder: Path, *, mesh: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: list[dict[str, Any]] = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = Normed() if name == "lightning" else Classifier()
        loop = LOOPS[name]
        if streamed and mesh and name == "model_parallel":
            loop = model_parallel  # it makes the mesh
        elif streamed and mesh:
            megacompile(model, mesh=init_device_mesh("cpu", (2,)))
        elif streamed:
            megacompile(model)
        losses = loop(model, folder)
        assert is_shared(model) == (streamed and mesh)
        params = {name: whole(param) for name, param in model.state_dict().items()}
        results.append({"losses": losses, "params": params})
        results[-1]["schedules"] = len(schedules(model)) if streamed else 0
    torch.save(results, folder / os.environ["RANK"])


def whole(param: Any) -> Tensor:
    """All of a parameter of which this rank may have a part."""
    found: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return found.detach().clone()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), mesh="mesh" in sys.argv[3:])
