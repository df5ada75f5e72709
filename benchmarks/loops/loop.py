"""One loop over a real model: its sizes, what it is given to run with, and how it takes steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any]  # keyword inputs of a call
LoopLoss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of models and of batches."""

    name: str
    width: int
    layers: int
    heads: int
    vocabulary: int
    rows: int  # of a batch
    longest: int  # tokens of a row
    pixels: int  # of a side of an image

    def lengths(self, count: int, seed: int = 0) -> list[int]:
        """Lengths of texts in the order of a shuffled data set."""
        drawn = random.Random(seed)
        return [drawn.randint(self.longest // 3, self.longest) for _ in range(count)]

    def rows_of(self, k: int, epoch: int = 4) -> int:
        """Rows of batch k: the last one of each epoch is smaller."""
        return self.rows // 2 + 1 if k % epoch == epoch - 1 else self.rows


SIZES = {
    size.name: size
    for size in (
        Size("least", 32, 1, 4, 64, 4, 24, 32),  # for tests: one layer
        Size("tiny", 32, 2, 4, 64, 4, 24, 32),
        Size("small", 512, 8, 8, 8192, 8, 512, 224),
    )
}


class Engine(StrEnum):
    """The code that runs the model."""

    OURS = "ours"
    PLAIN = "plain"
    COMPILE = "compile"  # torch.compile, in place


@dataclass(slots=True)
class Session:
    """One run of a loop by an engine."""

    engine: Engine
    size: Size
    steps: int
    device: str
    lowering: str
    dtype: torch.dtype
    begin: Callable[[nn.Module], None]  # is told of the model before the engine gets it
    done: Callable[..., None]  # is told of the losses at the end of each step

    def prepare(self, model: nn.Module) -> Any:
        """The model, as the engine runs it. Packages are imported before the time starts."""
        if self.engine is not Engine.PLAIN:
            from megacompile import megacompile  # and with it all of torch.compile
        model = model.to(self.dtype)
        self.begin(model)
        if self.engine is Engine.OURS:
            return megacompile(model, device=self.device, lowering=self.lowering, progress=False)
        model = model.to(self.device)
        if self.engine is Engine.COMPILE:
            model.compile(backend=self.lowering)
        return model

    def move(self, value: Any) -> Any:
        """A batch on the device; what is floating gets the model's dtype."""
        if isinstance(value, Tensor):
            return value.to(self.device, self.dtype if value.is_floating_point() else None)
        if isinstance(value, Mapping):
            return {key: self.move(item) for key, item in value.items()}
        return [self.move(item) for item in value] if isinstance(value, list) else value


Train = Callable[[Session], None]


class Family(StrEnum):
    """Kinds of models."""

    DECODER = "decoder"
    ENCODER = "encoder"
    SEQ2SEQ = "encoder-decoder"
    MOE = "MoE"
    VISION = "vision"
    SPEECH = "speech"
    RECURRENT = "recurrent"
    LORA = "LoRA"
    DIFFUSION = "diffusion"
    MULTIMODAL = "vision and language"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop by its name."""

    name: str
    family: Family
    train: Train
    needs: tuple[str, ...] = ("transformers",)  # packages
    drops: bool = False  # Inductor draws other elements for its dropout
    first: bool = True  # is it of the table that the tests hold to?


def output_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that models of transformers compute themselves."""
    loss: Tensor = model(**batch).loss
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def supervised(
    build: Callable[[Size], nn.Module],
    batch: Callable[[Size, int], Batch],
    *,
    loss_of: LoopLoss = output_loss,
    between: Callable[[Session, Any, int], list[Any]] | None = None,
) -> Train:
    """A loop of forward, backward, clipping and AdamW.

    Args:
        build: the model.
        batch: the k-th one.
        loss_of: a model and a batch.
        between: other calls of the model after step k; gives numbers to compare.
    """

    def train(session: Session) -> None:
        model = session.prepare(build(session.size).train())
        optimizer = optimizer_of(model)
        for k in range(session.steps):
            loss = loss_of(model, session.move(batch(session.size, k)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.done(loss, *(between(session, model, k) if between else ()))

    return train
