"""From records to rows: medians over the processes, reasons, and whether the work was the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.outcome import Outcome, Status
from benchmarks.peers.store import Record, Results
from benchmarks.peers.work import Setting
from benchmarks.report import table

LOSS_TOLERANCE = 0.01  # nats, of first losses at one setting: bf16 in other orders of operations


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one setting."""

    setting: Setting
    peer: str
    records: tuple[Record, ...]

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The results of its processes."""
        return [r.outcome.result for r in self.records if r.outcome.result is not None]

    @property
    def failure(self) -> Outcome | None:
        """The reason for which a process did not measure; None: all have."""
        if not self.records:
            return Outcome(Status.NOT_TRIED, "the run ended before")
        outcomes = (r.outcome for r in self.records)
        return next((o for o in outcomes if o.status is not Status.OK), None)

    def median(self, name: str) -> float | None:
        """The median of a figure over its processes; None where there is none."""
        values = [float(result[name]) for result in self.measured if name in result]
        return statistics.median(values) if values else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second."""
        step_s = self.median("step_s")
        return None if step_s is None else self.setting.batch * self.setting.length / step_s

    @property
    def first_loss(self) -> float | None:
        """Seconds of the first step; the median."""
        losses = [float(result["losses"][0]) for result in self.measured]
        return statistics.median(losses) if losses else None


def rows(results: Results) -> list[Row]:
    """In the order in which they were planned."""
    keys = dict.fromkeys((point.setting, point.peer) for point in results.planned)
    return [
        Row(
            setting,
            peer,
            tuple(r for r in results.records if (r.point.setting, r.point.peer) == (setting, peer)),
        )
        for setting, peer in keys
    ]


def expected_losses(of: Sequence[Row]) -> dict[Setting, float]:
    """The median of all systems' first losses at a setting."""
    losses: dict[Setting, list[float]] = {}
    for row in of:
        if row.first_loss is not None:
            losses.setdefault(row.setting, []).append(row.first_loss)
    return {setting: statistics.median(values) for setting, values in losses.items()}


def differing(of: Sequence[Row]) -> list[str]:
    """Systems whose first loss says that they did other work."""
    expected = expected_losses(of)
    return [
        f"{row.setting.text}: {row.peer}'s first loss is {row.first_loss:.4f}, "
        f"and {expected[row.setting]:.4f} is the median of all; {LOSS_TOLERANCE} apart are allowed"
        for row in of
        if row.first_loss is not None
        and not abs(row.first_loss - expected[row.setting]) <= LOSS_TOLERANCE
    ]


def figures(of: Sequence[Row]) -> str:
    """The table of what was measured, and of what was not and why."""
    expected = expected_losses(of)
    lines = [_cells(row, expected.get(row.setting)) for row in of]
    empty = {key for key in lines[0] if all(not line[key] for line in lines)} if lines else set()
    return table([{k: v for k, v in line.items() if k not in empty} for line in lines])


def _cells(row: Row, expected: float | None) -> dict[str, str]:
    seconds = [float(result["step_s"]) for result in row.measured]
    count, tokens_s = row.median("parameters"), row.tokens_s
    flops = None if count is None or tokens_s is None else 6 * count * tokens_s / 1e12
    cap = row.setting.cap_gib
    failure = row.failure
    return {
        "system": PEERS[row.peer].text,
        "model": row.setting.model,
        "tokens a step": f"{row.setting.batch}x{row.setting.length}",
        "GPU memory": "all" if cap is None else f"{cap:g} GiB",
        "s a step": _number(row.median("step_s"), "#.4g"),
        "range": f"{min(seconds):#.4g} .. {max(seconds):#.4g}" if len(seconds) > 1 else "",
        "tokens/s": _number(tokens_s, ".0f"),
        "TFLOP/s by 6NT": _number(flops, "#.3g"),
        "peak GPU GiB": _number(gib(row.median("gpu_bytes")), ".1f"),
        "host GiB": _number(gib(row.median("host_bytes")), ".1f"),
        "host GiB with setup": _number(gib(row.median("host_setup_bytes")), ".1f"),
        "first step s": _number(row.median("first_step_s"), ".1f"),
        "first loss": _loss(row.first_loss, expected),
        "last loss": _number(row.measured[-1]["losses"][-1] if seconds else None, ".4f"),
        "processes": str(len(seconds) or ""),
        "not measured": "" if failure is None else f"{failure.status.value}: {failure.reason}",
    }


def gib(size: float | None) -> float | None:
    """Bytes in GiB; None: not measured."""
    return None if size is None else size / 2**30


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).removesuffix(".")


def _loss(loss: float | None, expected: float | None) -> str:
    """ "12.6490 (+0.0001)": and what it is more than the median of all."""
    if loss is None or expected is None:
        return ""
    off = loss - expected
    differs = "" if abs(off) <= LOSS_TOLERANCE else ", DIFFERS"
    return f"{loss:.4f} ({off:+.4f}{differs})"


def kinds(of: Sequence[Row]) -> str:
    """The table of what each system keeps and does."""
    lines = []
    for name in dict.fromkeys(row.peer for row in of):
        peer = PEERS[name]
        packages = [r.outcome.package for row in of if row.peer == name for r in row.records]
        lines.append(
            {
                "name": f"`{name}`",
                "system": peer.text,
                "version": ", ".join(sorted({package for package in packages if package})),
                "weights": peer.weights,
                "moments": peer.moments,
                "recomputes": peer.recomputes,
                "clips to": peer.clips,
            }
        )
    return table(lines)
