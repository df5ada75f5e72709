"""Train LoRA adapters of PEFT: the base is frozen, so it is streamed and has no gradients.

    python examples/lora_peft.py            # streamed
    python examples/lora_peft.py --plain    # the same losses

Needs `transformers` and `peft` (`pip install -e '.[examples]'`).
"""

from collections.abc import Sequence

import torch
from example_parts import Rows, language_model, parse
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(language_model(), adapters)
    # what get_peft_model() returns is what is called, so it is what is megacompiled
    model = model.to(flags.device) if flags.plain else megacompile(model, device=flags.device)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _, batch in zip(range(flags.steps), DataLoader(Rows(), batch_size=8), strict=False):
        loss = model(**{name: value.to(flags.device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
