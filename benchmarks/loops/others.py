"""Loops over images, sound, and models of torch's own modules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.loop import Batch, Family, Loop, Size, supervised
from benchmarks.loops.texts import IGNORED, SECOND, bart, ids, pretrained

CLASSES = 10


def floats(*size: int, seed: int) -> Tensor:
    """Normally distributed float32."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# --- images


def images(size: Size, k: int) -> Batch:
    """An epoch of equal images, whose last batch is smaller."""
    rows = size.rows_of(k)
    pixels = floats(rows, 3, size.pixels, size.pixels, seed=k)
    return {"pixel_values": pixels, "labels": torch.arange(rows) % CLASSES}


def segments(size: Size, k: int) -> Batch:
    """With a class for each pixel."""
    batch = images(size, k)
    pixels = batch["pixel_values"]
    return {"pixel_values": pixels, "labels": (pixels[:, 0] > 0).long()}


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a model that gives logits."""
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def transformer(size: Size) -> dict[str, Any]:
    """ViT-S at the size `small`."""
    small = size.name == "small"
    return {
        "hidden_size": 384 if small else 32,
        "intermediate_size": 1536 if small else 64,
        "num_hidden_layers": 12 if small else size.layers,
        "num_attention_heads": 6 if small else 4,
        "image_size": size.pixels,
        "patch_size": 16 if small else 8,
        "num_labels": CLASSES,
    }


def timm(name: str, tiny: str, size: Size, **of_tiny: Any) -> nn.Module:
    """A classifier of timm, or for tests a smaller one of its family."""
    create = importlib.import_module("timm").create_model
    small = size.name == "small"
    options = {} if small else of_tiny
    model: nn.Module = create(
        name if small else tiny, pretrained=False, num_classes=CLASSES, **options
    )
    return model


def of_timm(name: str, model: str, tiny: str, *, first: bool = False, **of_tiny: Any) -> Loop:
    """A classifier; the last batch of an epoch is smaller."""
    build = functools.partial(timm, model, tiny, **of_tiny)
    train = supervised(build, images, loss_of=class_loss)
    return Loop(name, Family.VISION, train, ("timm",), drops=True, first=first)


def vision(
    name: str,
    kind: str,
    config: Callable[[Size], dict[str, Any]],
    batch: Callable[[Size, int], Batch] = images,
    head: str = "AutoModelForImageClassification",
    **more: Any,
) -> Loop:
    """A model of transformers."""
    train = supervised(functools.partial(pretrained, kind, config, head=head), batch)
    return Loop(name, Family.VISION, train, **more)


def residual(size: Size) -> dict[str, Any]:
    """ResNet-50 at the size `small`."""
    if size.name == "small":
        return {"num_labels": CLASSES}
    return {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "num_labels": CLASSES}


def windows(size: Size) -> dict[str, Any]:
    """Swin-T at the size `small`."""
    if size.name == "small":
        return {"num_labels": CLASSES}
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    return {**sizes, "depths": [2, 2], "num_heads": [2, 4], "num_labels": CLASSES}


def segformer(size: Size) -> dict[str, Any]:
    """SegFormer-B0 at the size `small`."""
    if size.name == "small":
        return {"num_labels": CLASSES}
    return {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
        "num_labels": CLASSES,
    }


# --- sound


def whisper(size: Size) -> dict[str, Any]:
    """Whisper's names, over half a second of sound."""
    return {**bart(size), "num_mel_bins": 80, **speech_sizes(size)}


def speech_sizes(size: Size) -> dict[str, int]:
    """Frames behind the convolutions, and tokens of an answer."""
    return {"max_source_positions": size.longest, "max_target_positions": 2 * size.longest}


def spoken(size: Size, k: int) -> Batch:
    """Spectra of one length, as Whisper has them; labels of many lengths."""
    labels = ids(size, size.rows, size.lengths(k + 1)[k], k)
    labels[-1, -2:] = IGNORED
    return {
        "input_features": floats(size.rows, 80, 2 * size.longest, seed=k),
        "labels": labels,
    }


def wav2vec2(size: Size) -> dict[str, Any]:
    """wav2vec2-base's layers at the size `small`, narrower ones at `tiny`."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "ctc_loss_reduction": "mean",
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
    }
    narrow = {
        "conv_dim": [16, 16],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
    }
    return sizes if size.name == "small" else {**sizes, **narrow}


def waves(size: Size, k: int) -> Batch:
    """Sound of many lengths, and what is said."""
    length = size.lengths(k + 1)[k] * (80 if size.name == "small" else 20)
    labels = torch.randint(3, 32, (size.rows, 5), generator=torch.Generator().manual_seed(k))
    return {"input_values": floats(size.rows, length, seed=k), "labels": labels}


# --- torch's own modules


class Recurrent(nn.Module):
    """A language model of recurrent layers; gives logits."""

    def __init__(self, cell: Callable[..., nn.Module], size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.cells = cell(size.width, size.width, num_layers=2, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, length) int64
        hidden, _ = self.cells(self.embed(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the next tokens, outside of the model."""
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(size: Size, k: int) -> Batch:
    """Texts of many lengths."""
    return {"tokens": ids(size, size.rows, size.lengths(k + 1)[k], k)}


def recurrent(name: str, cell: Callable[..., nn.Module]) -> Loop:
    """A language model over lengths that change."""
    train = supervised(functools.partial(Recurrent, cell), tokens, loss_of=next_loss)
    return Loop(name, Family.RECURRENT, train, ())


# --- diffusion


def unet(size: Size) -> nn.Module:
    """A UNet that hears a text."""
    channels = (128, 256) if size.name == "small" else (8, 16)
    model: nn.Module = importlib.import_module("diffusers").UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=channels,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    return model


def buckets(size: Size, k: int) -> Batch:
    """Latents of the aspect ratios of buckets."""
    scale = 4 if size.name == "small" else 1
    high, wide = ((16, 16), (24, 12), (12, 24), (20, 14), (14, 20))[k % 5]
    generator = torch.Generator().manual_seed(k)
    return {
        "sample": floats(size.rows, 4, high * scale, wide * scale, seed=k),
        "timestep": torch.randint(1000, (size.rows,), generator=generator),
        "encoder_hidden_states": floats(size.rows, 7, 16, seed=k + 1),
    }


def noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean square of what a model of diffusers predicts, as of noise."""
    return F.mse_loss(model(**batch).sample.float(), torch.zeros_like(batch["sample"]).float())


# --- images and texts


def clip(size: Size) -> dict[str, Any]:
    """Two towers."""
    sizes = {
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
    }
    text = {"vocab_size": size.vocabulary, "max_position_embeddings": 2 * size.longest}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "text_config": {**sizes, **text, **ends},
        "vision_config": {**sizes, "image_size": size.pixels, "patch_size": 16},
        "projection_dim": size.width,
    }


def captions(size: Size, k: int) -> Batch:
    """Images, and texts of many lengths; the last batch is smaller."""
    texts = ids(size, size.rows_of(k), size.lengths(k + 1)[k], k)
    texts[:, -1] = 2
    pixels = images(size, k)["pixel_values"]
    return {"input_ids": texts, "pixel_values": pixels, "return_loss": True}


LOOPS = [
    vision("vit-last", "vit", transformer),
    of_timm("resnet50-last", "resnet50", "resnet10t", first=True),
    of_timm("convnext-last", "convnext_tiny", "convnext_atto", first=True),
    Loop(
        "whisper-labels",
        Family.SPEECH,
        supervised(
            functools.partial(pretrained, "whisper", whisper, head="AutoModelForSpeechSeq2Seq"),
            spoken,
        ),
    ),
    recurrent("gru-varying", nn.GRU),
    recurrent("lstm-varying", nn.LSTM),
    Loop(
        "unet-buckets",
        Family.DIFFUSION,
        supervised(unet, buckets, loss_of=noise_loss),
        ("diffusers",),
    ),
    vision("resnet-last", "resnet", residual, **SECOND),
    vision("swin-last", "swin", windows, **SECOND),
    vision(
        "segformer-last",
        "segformer",
        segformer,
        segments,
        "AutoModelForSemanticSegmentation",
        **SECOND,
    ),
    of_timm("efficientnet-last", "efficientnet_b0", "efficientnet_lite0"),
    of_timm("mobilenet-last", "mobilenetv3_large_100", "mobilenetv3_small_050"),
    Loop(
        "wav2vec2-varying",
        Family.SPEECH,
        supervised(
            functools.partial(pretrained, "wav2vec2", wav2vec2, head="AutoModelForCTC"), waves
        ),
        drops=True,
        **SECOND,
    ),
    Loop(
        "clip-captions",
        Family.MULTIMODAL,
        supervised(functools.partial(pretrained, "clip", clip, head="AutoModel"), captions),
        **SECOND,
    ),
]
