"""The decisions that a plan is made from: the search chooses them, and the passes carry them
out."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Choice:
    """The decisions that a plan is made from."""

    keep: int = 1  # stages, counted from the last, whose saved tensors are kept
    resident: frozenset[int] = frozenset()  # bucket keys
    on_disk: frozenset[int] = frozenset()  # of those streamed, whose states are on the disk: keys
    device_update: float = 0.0  # the share of the streamed parameters that the device updates
    more_slots: int = 0  # than were asked for
    offload: int = 0  # of the first stages: what their recomputes take waits on the host
    saved_on_disk: int = 0  # of these, the first ones: it goes on from there to the disk
    rerun: int = 0  # stages whose outputs are computed again in the backward, not saved
    state_lookahead: int | None = None  # stages that states are fetched ahead; None: as weights
    state_delay: int = 1  # backwards that are issued before one waits for states to leave
    saved_on_host: int = 0  # other stages that are kept, with their saved tensors on the host
    halves: bool = False  # all kept stages but the last keep half, and compute the rest again
    tiles: int = 1  # in which what acts on each token alone runs
    weights_on_disk: frozenset[int] = frozenset()  # of those streamed, whose parameters do: keys
    stay: int = 0  # streamed buckets that keep their slots between forwards without a backward

    @property
    def computing(self) -> Choice:
        """The part that changes what is computed, and what is saved for that: not where buckets
        live, who updates them, and when they come and go."""
        where = Choice()
        return replace(
            self,
            resident=where.resident,
            on_disk=where.on_disk,
            weights_on_disk=where.weights_on_disk,
            saved_on_disk=where.saved_on_disk,
            device_update=where.device_update,
            more_slots=where.more_slots,
            state_lookahead=where.state_lookahead,
            state_delay=where.state_delay,
        )

    def __str__(self) -> str:
        return f"{self.keep} stages kept, {len(self.resident)} buckets resident"
