"""Train a vision transformer to classify images, with label smoothing and SGD with momentum.

    python examples/vision_vit.py            # streamed
    python examples/vision_vit.py --plain    # the same losses

Needs `transformers` (`pip install -e '.[examples]'`).
"""

from collections.abc import Sequence

import torch
from example_parts import parse
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from megacompile import megacompile

CLASSES = 4


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config)
    model = model.to(flags.device) if flags.plain else megacompile(model, device=flags.device)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(flags.steps):
        labels = torch.randint(0, CLASSES, (8,), generator=draw)
        images = torch.randn(8, 3, 32, 32, generator=draw) + labels.view(8, 1, 1, 1)
        logits = model(pixel_values=images.to(flags.device)).logits
        loss = functional.cross_entropy(logits, labels.to(flags.device), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
