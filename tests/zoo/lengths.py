"""Train an entry of the zoo on sizes that change, and count what is captured beside torch.compile.

The sizes are three lengths, then a smaller batch, then others of both. Images have one size; of
these the batches alone change.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.loops.loop import Engine, Family, Loop, supervised
from benchmarks.loops.measure import run
from tests.zoo.compare import loss_of
from tests.zoo.entry import BATCH, Call, Entry

ROWS, FEWER = 3, 2
SIZES = (  # rows of a batch, and tokens that are added to each text
    *((ROWS, 0), (ROWS, 3), (ROWS, 1), (FEWER, 0)),
    *((ROWS, 4), (FEWER, 2), (ROWS, 3), (FEWER, 5)),
)
SETTLED = 4  # steps
TEXTS = {  # inputs with a token in each column
    *("input_ids", "decoder_input_ids", "labels"),
    *("attention_mask", "token_type_ids", "mm_token_type_ids"),
}
SOUND = "input_values"  # (batch, samples)
SAMPLES = 20  # of sound for a token of a text


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """What was captured of one entry, by step."""

    name: str
    graphs: list[int]  # by Dynamo, for us
    programs: list[int]  # the schedules of these
    theirs: list[int]  # graphs of torch.compile
    equal: bool  # are the losses those of the plain model, but for the entry's `rounding`?
    why: tuple[str, ...]  # of late programs

    @property
    def is_more(self) -> bool:
        """Is more captured than torch.compile captures, in all or late?"""
        late = sum(self.theirs[SETTLED:])
        more = sum(self.graphs) > sum(self.theirs)
        return more or sum(self.programs[SETTLED:]) > late

    def line(self) -> str:
        """For people."""
        numbers = (
            f"{what} {' '.join(map(str, counts))}"
            for what, counts in (
                ("graphs", self.graphs),
                ("programs", self.programs),
                ("torch.compile", self.theirs),
            )
        )
        verdict = ("MORE " if self.is_more else "") + ("" if self.equal else "LOSSES DIFFER")
        return f"{self.name:32} {'  '.join(numbers)}  {verdict}"


def count(entry: Entry) -> Counted:
    """The captures of one entry, on the CPU with eager lowering."""
    batches = supervised(
        lambda size: entry.build(),
        lambda size, k: resized(entry.call(), *SIZES[k]),
        loss_of=lambda model, batch: loss_of(model(**batch)),
    )
    loop = Loop(entry.name, Family.ENCODER, batches)
    plain, theirs, ours = (
        run(loop, engine, size="least", steps=len(SIZES))
        for engine in (Engine.PLAIN, Engine.COMPILE, Engine.OURS)
    )
    tolerance = entry.rounding.tolerance if entry.rounding else 0.0
    losses = zip(sum(plain.losses, []), sum(ours.losses, []), strict=True)
    late = [line for step in ours.steps[SETTLED:] if step.programs for line in step.why]
    return Counted(
        entry.name,
        ours.graphs,
        [step.programs for step in ours.steps],
        theirs.graphs,
        all(abs(a - b) <= tolerance * abs(a) for a, b in losses),
        tuple(dict.fromkeys(line for line in late if "own code" in line)),
    )


def counted(name: str, entry: Entry) -> tuple[str, Counted | str]:
    """`count` of an entry, with the traceback where it fails."""
    torch.set_num_threads(1)
    try:
        return name, count(entry)
    except Exception:
        return name, traceback.format_exc()


def resized(call: Call, rows: int, longer: int) -> Call:
    """The inputs with so many rows, and texts that are so many tokens longer."""
    return {name: _longer(name, _of_rows(value, rows), longer) for name, value in call.items()}


def _of_rows(value: Any, rows: int) -> Any:
    """Of each row of a batch, the tensors may have several rows: an image's patches."""
    if isinstance(value, Mapping):
        return {name: _of_rows(item, rows) for name, item in value.items()}
    if isinstance(value, list):
        return [value[i % len(value)] for i in range(rows)] if len(value) == BATCH else value
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] % BATCH:
        return value
    chosen = torch.arange(rows) % BATCH
    return value.unflatten(0, (BATCH, -1))[chosen].flatten(0, 1)


def _longer(name: str, value: Any, longer: int) -> Any:
    """A text that goes on with its last token, or sound with its last sample."""
    columns = longer if name in TEXTS else longer * SAMPLES if name == SOUND else 0
    if not columns or not isinstance(value, Tensor) or value.dim() != 2:
        return value
    return torch.cat([value, value[:, -1:].expand(-1, columns)], 1)
