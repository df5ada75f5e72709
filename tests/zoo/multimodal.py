"""Models of transformers that read images and text."""

from __future__ import annotations

import torch

from tests.zoo.entry import BATCH, Call, Entry, Family, Rounding, floats, ids
from tests.zoo.hugging_face import GROUPED, TINY, TURNS, of_transformers

SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
PATCHES = 4  # of an image
IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = 60, 61, 62, 63


def _pairs() -> Call:
    return {
        "input_ids": ids(below=60),
        "pixel_values": floats(BATCH, 3, 16, 16),
        "return_loss": True,
    }


def _siglip() -> Call:
    return {**_pairs(), "input_ids": ids(BATCH, 8, below=60)}


def _prompt() -> Call:
    """Four tokens that stand for the image, before a text."""
    tokens = ids(BATCH, 12, below=60)
    tokens[:, 1 : 1 + PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": floats(BATCH, 3, 16, 16),
    }


def _typed_prompt() -> Call:
    call = _prompt()
    return {**call, "token_type_ids": torch.zeros_like(call["input_ids"])}


def _qwen() -> Call:
    """16 patches in groups of 2 x 2."""
    tokens = ids(BATCH, 12, below=60)
    tokens[:, 1] = START_TOKEN
    tokens[:, 2 : 2 + PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "pixel_values": floats(BATCH * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


QWEN = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": START_TOKEN,
    "vision_end_token_id": END_TOKEN,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TEXT_AND_IMAGE = "AutoModelForImageTextToText"
SIZES = "the sizes of the images are data: transformers loops over them and splits by them"
COUNTS = "transformers compares the number of an image's tokens with its features, by `item()`"
GROUPS = Rounding(
    1e-6,
    "where it is captured, transformers makes a mask that masks nothing: gradients of keys and "
    "values of grouped heads are added in another order",
)
ENTRIES: list[Entry] = [
    *of_transformers(
        Family.MULTIMODAL,
        "CLIPModel",
        "clip",
        {"text_config": TINY, "vision_config": SIGHT, "projection_dim": 16},
        _pairs,
    ),
    *of_transformers(
        Family.MULTIMODAL,
        "SiglipModel",
        "siglip",
        {"text_config": TINY, "vision_config": SIGHT},
        _siglip,
    ),
    *of_transformers(
        Family.MULTIMODAL,
        TEXT_AND_IMAGE,
        "llava",
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": {**SIGHT, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_layer": -1,
        },
        _prompt,
        note=COUNTS,
        rounding={"sdpa": GROUPS},
    ),
    *of_transformers(
        Family.MULTIMODAL,
        TEXT_AND_IMAGE,
        "paligemma",
        {
            "text_config": {**GROUPED, "model_type": "gemma", "head_dim": 8},
            "vision_config": {**SIGHT, "model_type": "siglip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": 32,
        },
        _typed_prompt,
        note=COUNTS,
    ),
    *of_transformers(
        Family.MULTIMODAL,
        TEXT_AND_IMAGE,
        "qwen2_vl",
        {
            "text_config": {**GROUPED, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "patch_size": 8,
                "mlp_ratio": 2,
            },
            **QWEN,
        },
        _qwen,
        note=SIZES,
        rounding={"sdpa": GROUPS},
    ),
    *of_transformers(
        Family.MULTIMODAL,
        TEXT_AND_IMAGE,
        "qwen2_5_vl",
        {
            "text_config": {**GROUPED, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_heads": 4,
                "patch_size": 8,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            },
            **QWEN,
        },
        _qwen,
        note=SIZES,
        rounding={"eager": TURNS, "sdpa": Rounding(1e-6, f"{GROUPS.why}; {TURNS.why}")},
    ),
]
