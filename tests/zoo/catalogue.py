"""Every entry of the zoo, by name."""

from __future__ import annotations

from tests.zoo import (
    audio,
    decoders,
    diffusion,
    encoders,
    multimodal,
    of_torch,
    packages,
    seq2seq,
    vision,
)
from tests.zoo.entry import Entry

packages.prepare()  # before any other package imports torchvision

FILES = (decoders, encoders, seq2seq, vision, multimodal, audio, of_torch, diffusion)

ENTRIES: dict[str, Entry] = {entry.name: entry for file in FILES for entry in file.ENTRIES}
