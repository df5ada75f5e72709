"""Every entry of the zoo, by name."""

from __future__ import annotations

from tests.zoo import diffusion, of_torch, senses, texts
from tests.zoo.entry import Entry, prepare

prepare()  # before any other package imports torchvision

FILES = (texts, senses, of_torch, diffusion)

ENTRIES: dict[str, Entry] = {entry.name: entry for file in FILES for entry in file.ENTRIES}
