"""Machines by name: one that was measured, data sheets of others, and the one at hand."""

from __future__ import annotations

import torch

from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import load
from megacompile.cost.sheets import NAMES, of_sheet
from megacompile.errors import OptionError


def known(name: str) -> Hardware:
    """A machine by name: h200 (measured), h100, a100, 4090, 3090, 3080 (data sheets), this.

    "this" is the machine at hand, measured once. How much memory a host has is not known but of
    this one: `known("4090").replace(host_bytes=128 * 2**30)`.

    Raises:
        OptionError: a name that is not among them.
    """
    key = name.lower() if isinstance(name, str) else name
    if key == "this":
        return load("cuda" if torch.cuda.is_available() else "cpu")
    found = of_sheet(key)
    if found is None:
        raise OptionError(
            f"known(): got {name!r}; needed one of {', '.join(NAMES)}; or make a "
            "megacompile.cost.hardware.Hardware of your own figures"
        )
    return found
