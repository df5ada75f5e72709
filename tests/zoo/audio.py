"""Audio models of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import BATCH, Call, Entry, Family, floats, ids
from tests.zoo.hugging_face import of_transformers

WAVE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}


def _wave() -> Call:
    return {"input_values": floats(BATCH, 400), "labels": ids(BATCH, 5, below=32)}


def _spectrum() -> Call:
    return {"input_values": floats(BATCH, 32, 16), "labels": torch.tensor([0, 1])}


TRANSPOSED = "attention drops elements of a tensor that is transposed in eager code"
CTC = (
    "transformers branches on the labels, sets `requires_grad` in the forward, and selects labels "
    "by a mask for the loss"
)


def ctc(kind: str, **of_entry: Any) -> list[Entry]:
    return of_transformers(
        Family.AUDIO, "AutoModelForCTC", kind, WAVE, _wave, note=CTC, draws=TRANSPOSED, **of_entry
    )


ENTRIES: list[Entry] = [
    *ctc("wav2vec2"),
    *ctc("hubert"),
    *ctc("wavlm", attention=("eager",)),
    *of_transformers(
        Family.AUDIO,
        "AutoModelForAudioClassification",
        "audio-spectrogram-transformer",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        _spectrum,
    ),
]
