"""Reinforcement learning with GRPO of TRL: completions are sampled, scored, and learned from.

    python examples/grpo_trl.py            # streamed
    python examples/grpo_trl.py --plain    # the same losses

The reward is made up: the share of a completion that is the token "a". `generate()` runs on the
streamed model. Needs `trl` (`pip install -e '.[examples]'`).
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from example_parts import VOCABULARY, language_model, parse
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from megacompile import megacompile


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model knows."""
    names = ["<pad>", "<eos>", "a", "b", *(f"w{i}" for i in range(4, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="b"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def share_of_a(completions: list[str], **others: Any) -> list[float]:
    """The reward of each completion."""
    return [text.split().count("a") / max(1, len(text.split())) for text in completions]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; gives the loss of each step."""
    flags = parse(__doc__, argv)
    model = language_model()
    if not flags.plain:
        model = megacompile(model, device=flags.device)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=flags.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=flags.device == "cpu",
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=share_of_a,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a b w4", "b w5 w6"] * 16}),
            processing_class=words(),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())
