"""Models of diffusers."""

from __future__ import annotations

import torch

from tests.zoo.entry import BATCH, Call, Entry, floats, of_diffusers

STEPS = torch.tensor([3, 500])


def _noisy(channels: int = 3) -> Call:
    return {"sample": floats(BATCH, channels, 16, 16), "timestep": STEPS}


def _told() -> Call:
    """With a text to hear."""
    return {**_noisy(4), "encoder_hidden_states": floats(BATCH, 6, 16, seed=3)}


def _image() -> Call:
    return {"sample": floats(BATCH, 3, 16, 16)}


def _latent() -> Call:
    return {"hidden_states": floats(BATCH, 4, 8, 8), "timestep": STEPS}


def _dit() -> Call:
    return {**_latent(), "class_labels": torch.tensor([1, 2])}


def _pixart() -> Call:
    shape = {"resolution": None, "aspect_ratio": None}
    text = floats(BATCH, 6, 16, seed=3)
    return {**_latent(), "encoder_hidden_states": text, "added_cond_kwargs": shape}


def _sd3() -> Call:
    text, pooled = floats(BATCH, 6, 32, seed=3), floats(BATCH, 16, seed=4)
    return {**_latent(), "encoder_hidden_states": text, "pooled_projections": pooled}


def _flux() -> Call:
    return {
        **_sd3(),
        "hidden_states": floats(BATCH, 16, 4),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_ids": torch.arange(48.0).view(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


ENTRIES: list[Entry] = [
    of_diffusers(
        "UNet2DModel",
        "BLOCKS sample_size=16 down_block_types=('DownBlock2D','AttnDownBlock2D') "
        "up_block_types=('AttnUpBlock2D','UpBlock2D') attention_head_dim=8",
        _noisy,
    ),
    of_diffusers(
        "UNet2DConditionModel",
        "BLOCKS sample_size=16 down_block_types=('DownBlock2D','CrossAttnDownBlock2D') "
        "up_block_types=('CrossAttnUpBlock2D','UpBlock2D') cross_attention_dim=16 "
        "attention_head_dim=4",
        _told,
    ),
    of_diffusers(
        "AutoencoderKL",
        "BLOCKS down_block_types=('DownEncoderBlock2D','DownEncoderBlock2D') "
        "up_block_types=('UpDecoderBlock2D','UpDecoderBlock2D')",
        _image,
    ),
    of_diffusers("VQModel", "block_out_channels=(8,) norm_num_groups=4", _image),
    of_diffusers("DiTTransformer2DModel", "LATENTS num_embeds_ada_norm=10", _dit),
    of_diffusers(
        "PixArtTransformer2DModel", "LATENTS cross_attention_dim=32 caption_channels=16", _pixart
    ),
    of_diffusers(
        "SD3Transformer2DModel",
        "LATENTS PROMPT patch_size=2 caption_projection_dim=32 pos_embed_max_size=8",
        _sd3,
    ),
    of_diffusers(
        "FluxTransformer2DModel",
        "HEADS PROMPT num_layers=1 num_single_layers=2 axes_dims_rope=(2,2,4) "
        "guidance_embeds=False",
        _flux,
    ),
]
