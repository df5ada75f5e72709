"""A LightningModule: the model inside of it is megacompiled, not the LightningModule.

    python examples/lightning_module.py            # streamed
    python examples/lightning_module.py --plain    # the same losses

Needs `transformers` and `lightning` (`pip install -e '.[examples]'`).
"""

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from example_parts import Rows, language_model, parse
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megacompile import megacompile


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """Trains a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        """The loss of a batch."""
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    model = language_model()
    if not flags.plain:
        model = megacompile(model, device=flags.device)

    module = Module(model)
    trainer = lightning.Trainer(
        accelerator="cpu" if flags.device == "cpu" else "gpu",
        devices=1,
        max_steps=flags.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=8))
    return module.losses


if __name__ == "__main__":
    print(main())
