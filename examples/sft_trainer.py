"""Fine-tune a language model with the Trainer of transformers: micro-batches, clipping, warm-up.

    python examples/sft_trainer.py            # streamed
    python examples/sft_trainer.py --plain    # the same losses

Needs `transformers` and `accelerate` (`pip install -e '.[examples]'`).
"""

import tempfile
from collections.abc import Sequence

from example_parts import Rows, language_model, parse
from transformers import Trainer, TrainingArguments

from megacompile import megacompile


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    model = language_model()
    if not flags.plain:
        model = megacompile(model, device=flags.device)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=flags.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=2,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=flags.device == "cpu",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())
