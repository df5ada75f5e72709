"""Encoders of transformers: masked language models and classifiers of texts."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import BATCH, LENGTH, Call, Entry, Family, ids
from tests.zoo.hugging_face import TINY, TURNS, of_transformers

DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ALONE = {"attention": ("eager",)}  # it has no other


def _masked() -> Call:
    """The second row is padded."""
    tokens = ids()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def _classified() -> Call:
    return {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def encoder(kind: str, config: dict[str, Any], **of_entry: Any) -> list[Entry]:
    return of_transformers(
        Family.ENCODERS, "AutoModelForMaskedLM", kind, {**TINY, **config}, _masked, **of_entry
    )


def classifier(kind: str, config: dict[str, Any], **of_entry: Any) -> list[Entry]:
    head = "AutoModelForSequenceClassification"
    return of_transformers(Family.ENCODERS, head, kind, {**TINY, **config}, _classified, **of_entry)


ENTRIES: list[Entry] = [
    *encoder("bert", DROPPED),
    *encoder("roberta", DROPPED),
    *encoder(
        "deberta",
        {"pos_att_type": ["c2p", "p2c"], "relative_attention": True},
        note="its attention calls `item()`, and functions of torch.jit",
        rounding={"eager": TURNS},
        **ALONE,
    ),
    *encoder("deberta-v2", {"pos_att_type": ["c2p", "p2c"], "relative_attention": True}, **ALONE),
    *encoder("modernbert", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    *encoder("electra", {"embedding_size": 16}),
    *encoder("albert", {"embedding_size": 16}),
    *encoder(
        "distilbert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.1}
    ),
    *encoder("mpnet", {}, **ALONE),
    *encoder("xlm-roberta", {}),
    *classifier("ernie", {}),
]
