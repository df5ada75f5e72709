"""QLoRA: adapters of PEFT over a base in 4 bits of bitsandbytes, which is streamed as it is.

    python examples/qlora_bitsandbytes.py            # streamed
    python examples/qlora_bitsandbytes.py --plain    # the same losses

Needs `transformers`, `accelerate`, `peft` and `bitsandbytes` (`pip install -e '.[examples]'`).
"""

import tempfile
from collections.abc import Sequence

import torch
from example_parts import Rows, language_model, parse
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:  # yours has the weights already
        language_model().save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=quantization,
            device_map={"": flags.device if flags.plain else "cpu"},  # it need not fit on the GPU
        )
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)
    if not flags.plain:
        model = megacompile(model, device=flags.device)

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
