"""Batches of the workloads: texts, prompts, images and latents of many sizes, by a seed.

A batch is as long as its longest text, and the first batch of a run as large as any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
IGNORED = -100  # a label that counts for no loss
GROUP = 4  # answers to each prompt
# Height to width of pictures of one area.
FORMS = ((1, 1), (9, 7), (7, 9), (5, 4), (4, 5), (2, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a batch, and the most that a row has."""

    rows: int
    tokens: int
    image: int = 0  # the side of the largest image, in patches of the model
    new_tokens: int = 0  # that are generated in a step


def _generator(k: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + k)


def _lengths(k: int, sizes: Sizes) -> Tensor:
    """Lengths of texts: an eighth of the longest, or more; short ones are frequent."""
    share = torch.rand(sizes.rows, generator=_generator(k)).square()
    found = (sizes.tokens * (0.125 + 0.875 * share)).long()
    if k == 0:
        found[0] = sizes.tokens
    return found


def texts(k: int, sizes: Sizes, shape: Mapping[str, Any]) -> Batch:
    """Texts, filled to the longest of them on the right."""
    lengths = _lengths(k, sizes)
    length = int(lengths.max())
    below = shape.get("vocab_size") or min(
        v for name, v in shape.items() if name.endswith("token_id")
    )
    ids = torch.randint(3, below, (sizes.rows, length), generator=_generator(k))
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def prompts(k: int, sizes: Sizes, shape: Mapping[str, Any]) -> Batch:
    """`GROUP` rows of each text, filled on the left, because a model goes on with them."""
    batch = texts(k, replace(sizes, rows=sizes.rows // GROUP), shape)
    del batch["labels"]
    lengths = batch["attention_mask"].sum(1).tolist()
    turned = {
        name: torch.stack([row.roll(-n) for row, n in zip(value, lengths, strict=True)])
        for name, value in batch.items()
    }
    return {name: value.repeat_interleave(GROUP, 0) for name, value in turned.items()}


def images_and_texts(k: int, sizes: Sizes, shape: Mapping[str, Any]) -> Batch:
    """An image and a text in each row, both of many sizes; the loss is of the text alone."""
    batch = texts(k, sizes, shape)
    sides = (torch.rand(sizes.rows, 2, generator=_generator(k)) * sizes.image).long() // 4 * 4
    sides = torch.full_like(sides, sizes.image) if k == 0 else sides.clamp(min=4)
    seen = sides.prod(1) // 4 + 2  # 2x2 patches are a token; a token before and one behind them
    rows = []
    for text, mask, count in zip(
        batch["input_ids"], batch["attention_mask"], seen.tolist(), strict=True
    ):
        image = torch.full((count,), shape["image_token_id"])
        image[0], image[-1] = shape["vision_start_token_id"], shape["vision_end_token_id"]
        rows.append(torch.cat([image, text[mask == 1]]))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    no_text = (ids == 0) | (torch.arange(ids.shape[1]) < seen[:, None])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(no_text, IGNORED),
        "mm_token_type_ids": (ids == shape["image_token_id"]).long(),
        "pixel_values": torch.randn(
            int(sides.prod(1).sum()), 3 * 2 * 14 * 14, generator=_generator(k)
        ).bfloat16(),
        "image_grid_thw": torch.cat([torch.ones(sizes.rows, 1, dtype=torch.long), sides], 1),
    }


def latents_and_texts(k: int, sizes: Sizes, shape: Mapping[str, Any]) -> Batch:
    """Latents of one form a batch, beside a text of one length, as Flux has them."""
    high, wide = FORMS[k % len(FORMS)]
    scale = sizes.image / (high * wide) ** 0.5
    high, wide = int(scale * high), int(scale * wide)
    generator, rows = _generator(k), sizes.rows

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    places = torch.zeros(high, wide, 3)
    places[..., 1] = torch.arange(high)[:, None]
    places[..., 2] = torch.arange(wide)
    return {
        "latents": draw(rows, high * wide, 64),
        "noise": draw(rows, high * wide, 64),
        "time": torch.sigmoid(draw(rows)),
        "guidance": torch.ones(rows, dtype=torch.bfloat16),
        "encoder_hidden_states": draw(rows, sizes.tokens, shape.get("joint_attention_dim", 4096)),
        "pooled_projections": draw(rows, shape.get("pooled_projection_dim", 768)),
        "img_ids": places.view(-1, 3),
        "txt_ids": torch.zeros(sizes.tokens, 3),
    }


def token_count(batch: Batch) -> int:
    """Tokens of a batch, without what fills it up."""
    if "latents" in batch:
        return batch["latents"].shape[0] * (len(batch["img_ids"]) + len(batch["txt_ids"]))
    return int(batch["attention_mask"].sum())


Draw = Callable[[int, Sizes, Mapping[str, Any]], Batch]  # the batch of a step, for a model's shape
