"""A loop of Accelerate, with micro-batches and clipping.

    python examples/accelerate_loop.py            # streamed
    python examples/accelerate_loop.py --plain    # the same losses

Needs `transformers` and `accelerate` (`pip install -e '.[examples]'`).
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from example_parts import Rows, language_model, parse
from torch.utils.data import DataLoader

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each micro-batch."""
    flags = parse(__doc__, argv)
    accelerator = Accelerator(cpu=flags.device == "cpu", gradient_accumulation_steps=2)
    model = language_model()
    if not flags.plain:
        model = megacompile(model, device=flags.device)  # before prepare()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(Rows(), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _, batch in zip(range(2 * flags.steps), data, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        print(f"micro-batch {len(losses)}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
