"""What copies take where not all of host memory can be page-locked.

A copy from or to pageable memory goes through a small locked buffer of the driver, at about half
the rate. Which buffers are locked depends on the order in which they are made, so each copy is
taken to have the share of pageable memory that all of them have.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.cost.hardware import Hardware

SHARE = 0.5  # of the rate of a copy from or to page-locked memory
_COPIES = ("h2d_gb_s", "d2h_gb_s", "h2d_both_gb_s", "d2h_both_gb_s")


def with_pageable(hardware: Hardware, host_bytes: int) -> Hardware:
    """The machine with the rates that copies have where this much host memory is used."""
    locked = hardware.locked_bytes
    if locked is None or host_bytes <= locked:
        return hardware
    pageable = 1 - locked / host_bytes
    slower = 1 / (1 - pageable + pageable / SHARE)
    return replace(hardware, **{name: slower * getattr(hardware, name) for name in _COPIES})
