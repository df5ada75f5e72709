"""Code that the short examples share: flags, a tiny language model, tokens to train it on.

The loops themselves are in the scripts. Nothing is downloaded: models are made from configs, and
data is made up.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 64
LENGTH = 16  # tokens in a row


def parse(doc: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of an example: `--plain`, `--steps`, `--device`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true", help="leave megacompile out")
    parser.add_argument("--steps", type=int, default=6, help="of the optimizer; default: 6")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"where to compute; default: {default}")
    return parser.parse_args(argv)


class Rows(Dataset[dict[str, Tensor]]):
    """64 rows of tokens that count upward from somewhere, their own labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = (torch.arange(LENGTH) + 7 * index) % VOCABULARY
        return {"input_ids": ids, "labels": ids.clone()}


def language_model(seed: int = 0) -> Any:
    """A `Qwen2ForCausalLM` of two layers. With your own weights: `from_pretrained(...)`."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)
