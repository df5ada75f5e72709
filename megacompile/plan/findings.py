"""The parts of the explanation of a planned step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megacompile.code_counts import CodeCounts
from megacompile.plan.scenario import Change
from megacompile.plan.slow_ranks import SlowRank
from megacompile.plan.stage_groups import StageGroup
from megacompile.tracing.critical_path import LastRank


@dataclass(frozen=True, slots=True)
class Memory:
    """The needs of a memory, by user."""

    kinds: dict[str, int]
    needed_bytes: int
    there_bytes: int | None  # None: not known
    when: str = ""  # the op at the peak

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return None if self.there_bytes is None else self.needed_bytes <= self.there_bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a model has read from its disk and written to it so far.

    Reads through mappings, as by `state_dict()`, are not counted.
    """

    read_bytes: int
    written_bytes: int
    steps: int  # of optimizers over its parameters, that have begun meanwhile


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """Traffic between host memory and a disk, which writes wear; bytes."""

    read_bytes: int  # in each step, by the plan
    written_bytes: int
    so_far: Moved | None = None  # measured; None: it is a plan alone


@dataclass(frozen=True, slots=True)
class Busy:
    """One stream over a step."""

    stream: str
    predicted_s: float
    waited_s: float  # of the step's time, what its end waited for this stream
    traced_s: float | None  # a step, where a trace was taken
    traced_waited_s: float | None  # of that step's time, what its end waited for this stream

    @property
    def works(self) -> bool:
        return bool(self.predicted_s or self.traced_s)


@dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """The findings about a planned step."""

    model: str
    hardware: str
    parameters: int
    templates: int
    stages: tuple[StageGroup, ...]
    device: Memory
    host: Memory
    disk: Memory | None  # None: there is none
    reasons: tuple[str, ...]
    step_s: float  # predicted
    traced_step_s: float | None
    traced_none_s: float | None  # of it, where no recorded op was what the step waited for
    streams: tuple[Busy, ...]
    bounds: dict[str, float]  # resource -> its share of the step's time, the largest first
    changes: tuple[Change, ...]
    budgets: tuple[Change, ...]  # what a tenth more of each would buy
    locked_bytes: int | None = None  # of host memory, page-locked; None: nothing has to be
    page_locked: Memory | None = None  # what is to be, and what can be; None: no limit is known
    pageable_s: float = 0.0  # of a step: what it costs that less can be
    numa_node: str | None = None  # near the GPU, where its host memory is; None: there is one
    ranks: int = 1  # that share the model; memory and times are those of one
    replicas: int = 1  # how many ranks have the same part of it
    network_gb_s: float | None = None  # what one gets from the others of these; None: no replicas
    network_is_assumed: bool = False  # it was neither measured nor told
    hosts: tuple[str, ...] = ()  # theirs, where ranks share the model and their rates are known
    slow_ranks: tuple[SlowRank, ...] = ()  # rates at which some are behind, what costs most first
    last_rank: LastRank | None = None  # whom the others wait for, where all ranks were traced
    disk_traffic: DiskTraffic | None = None  # None: nothing is on a disk
    code: dict[str, CodeCounts] = field(default_factory=dict)  # by kind: what was compiled, if any

    @property
    def bound(self) -> str:
        """The bound of the step: compute, h2d, d2h, host memory bandwidth, host update, disk or,
        where ranks share the model, interconnect or network (between those with the same part)."""
        return next(iter(self.bounds))

    @property
    def traced_bound(self) -> str | None:
        """The stream that the traced steps waited for most ("host": the host's update).

        Whom a step waits for is not always who is busiest; see `megacompile.tracing.critical_path`.
        """
        waits = self.traced_waits
        return max(waits, key=waits.__getitem__) if waits else None

    @property
    def traced_waits(self) -> dict[str, float]:
        """The share of the traced step's time that its end waited for each stream; {}: no trace."""
        step_s = self.traced_step_s
        found = {
            row.stream: row.traced_waited_s / step_s
            for row in self.streams
            if step_s and row.traced_waited_s is not None
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def traced_busiest(self) -> str | None:
        """The stream that had work for most of the traced steps' time."""
        busy = {row.stream: row.traced_s for row in self.streams if row.traced_s is not None}
        return max(busy, key=lambda name: busy[name] or 0.0) if busy else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has. Seconds and bytes."""
        found = asdict(self)
        for name in ("device", "host", "disk", "page_locked"):
            if (memory := getattr(self, name)) is not None:
                found[name]["fits"] = memory.fits
        bounds = {"bound": self.bound, "traced_bound": self.traced_bound}
        return {**found, **bounds, "traced_waits": self.traced_waits}
