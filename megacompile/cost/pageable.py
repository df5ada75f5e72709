"""The time of copies where not all of host memory can be page-locked.

A copy from or to pageable memory goes through a small locked buffer of the driver, at about half
the rate. Which buffers are locked depends on the order in which they are made, so each copy is
taken to have the share of pageable memory that all of them have.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.cost.hardware import Hardware
from megacompile.text import format_bytes

SHORT = "page-locked memory: "  # what `pageable_words` begins with
SHARE = 0.5  # of the rate of a copy from or to page-locked memory
_COPIES = ("h2d_gb_s", "d2h_gb_s", "h2d_both_gb_s", "d2h_both_gb_s")


def with_pageable(hardware: Hardware, host_bytes: int) -> Hardware:
    """The machine with the rates that copies have where this much host memory is used."""
    share = _rate_share(hardware, host_bytes)
    if share == 1.0:
        return hardware
    return replace(hardware, **{name: share * getattr(hardware, name) for name in _COPIES})


def pageable_bytes(hardware: Hardware, host_bytes: int) -> int:
    """Bytes of so much host memory that the system is known not to lock."""
    locked = hardware.locked_bytes
    return 0 if locked is None else max(0, host_bytes - locked)


def pageable_words(hardware: Hardware, host_bytes: int) -> str:
    """The words of a plan about that; "" where all is locked, as far as is known."""
    pageable = pageable_bytes(hardware, host_bytes)
    if not pageable:
        return ""
    there, rate = hardware.locked_bytes or 0, _rate_share(hardware, host_bytes)
    return (
        f"{SHORT}{format_bytes(host_bytes)} needed, {format_bytes(there)} available: "
        f"{format_bytes(pageable)} stay pageable, and copies between host and device run at "
        f"{rate:.0%} of their rate"
    )


def _rate_share(hardware: Hardware, host_bytes: int) -> float:
    """The share of the rate that copies have where all of host memory is locked."""
    if not (pageable := pageable_bytes(hardware, host_bytes)):
        return 1.0
    share = pageable / host_bytes
    return 1 / (1 - share + share / SHARE)
