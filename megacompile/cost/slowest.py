"""The slow ones of several ranks, and what they are slow at.

    matrix products   655 652 610 657 TFLOP/s   ->   rank 2: 610, the others 655, the fastest 657

A rank is slow if it is nearer to the slowest than to the fastest. So a host whose memory is slow is
named with all of its ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megacompile.cost.hardware import Hardware

FELT = 0.03  # to be behind by less is noise: a rate is measured within seconds


@dataclass(frozen=True, slots=True)
class RankRates:
    """Rates of one rank: a GPU of its own, and its host as a whole."""

    rank: int  # of all processes
    host: str
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that ranks are compared by."""

    name: str
    unit: str
    fields: tuple[str, ...]  # of `Hardware`; the first one is compared
    times: str = ""  # another field, by which it is multiplied
    scale: float = 1.0  # from a field's unit to this one
    seconds: bool = False  # more is slower

    def of(self, hardware: Hardware) -> float | None:
        """In the unit; None: not known, or none."""
        value: float | None = getattr(hardware, self.fields[0])
        if value is None:
            return None
        return value * self.scale * (getattr(hardware, self.times) if self.times else 1.0)


FIGURES = (
    Figure("matrix products", "TFLOP/s", ("matmul_tflop_s",), "sustained"),
    Figure("fp32 matrix products", "TFLOP/s", ("matmul32_tflop_s",), "sustained"),
    Figure("fp8 matrix products", "TFLOP/s", ("matmul8_tflop_s",), "sustained"),
    Figure("GPU memory", "GB/s", ("memory_gb_s",)),
    Figure("copies to the GPU", "GB/s", ("h2d_gb_s", "h2d_both_gb_s")),
    Figure("copies from the GPU", "GB/s", ("d2h_gb_s", "d2h_both_gb_s")),
    Figure("host memory", "GB/s", ("host_memory_gb_s",)),
    Figure("updates on the host", "GB/s", ("update_gb_s",)),
    Figure("reads of the disk", "GB/s", ("disk_read_gb_s", "disk_read_both_gb_s")),
    Figure("writes to the disk", "GB/s", ("disk_write_gb_s", "disk_write_both_gb_s")),
    Figure("kernel launches", "us", ("launch_s",), scale=1e6, seconds=True),
    Figure("the start of a copy", "us", ("copy_s",), scale=1e6, seconds=True),
)


@dataclass(frozen=True, slots=True)
class SlowRate:
    """A rate at which some ranks are behind the others."""

    name: str
    unit: str
    ranks: tuple[int, ...]  # the slow ones
    hosts: tuple[str, ...]  # theirs
    value: float  # of the slowest, which plans are made with
    median: float  # of the others
    fastest: float
    behind: float  # of the median: 0.07 is 7 % slower
    fields: tuple[str, ...]  # of `Hardware`

    def at_median(self, hardware: Hardware) -> Hardware:
        """The same machine with the others' rate."""
        ratio = self.median / self.value
        return hardware.replace(**{name: getattr(hardware, name) * ratio for name in self.fields})


def slow_rates(ranks: Sequence[RankRates]) -> list[SlowRate]:
    """Rates at which ranks are behind by more than `FELT`, the largest gap first."""
    found = [_slow(figure, ranks) for figure in FIGURES]
    slow = [each for each in found if each is not None and each.behind > FELT]
    return sorted(slow, key=lambda each: -each.behind)


def _slow(figure: Figure, ranks: Sequence[RankRates]) -> SlowRate | None:
    given = [(each, figure.of(each.hardware)) for each in ranks]
    values = [(each, value) for each, value in given if value and math.isfinite(value)]
    if len(values) != len(ranks) or not ranks:
        return None  # some rank has no such rate
    sign = 1 if figure.seconds else -1
    values.sort(key=lambda item: (-sign * item[1], item[0].rank))
    (_, slowest), (_, fastest) = values[0], values[-1]
    between = (slowest + fastest) / 2
    slow = [each for each, value in values if sign * value > sign * between]
    if not slow:
        return None
    median = statistics.median(value for _, value in values[len(slow) :])
    return SlowRate(
        figure.name,
        figure.unit,
        tuple(sorted(each.rank for each in slow)),
        tuple(dict.fromkeys(each.host for each in slow)),
        slowest,
        median,
        fastest,
        1 - (median / slowest if figure.seconds else slowest / median),
        figure.fields,
    )
