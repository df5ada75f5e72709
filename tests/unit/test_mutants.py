"""`verify` reports every mutant that can go wrong, and none that cannot.

What can go wrong is decided without it: by walking all interleavings on symbols (`tests.symbolic`).
`python -m tests.prove --mutants` judges thousands.
"""

from __future__ import annotations

from megacompile.verify.proof import HazardKind
from tests import originals, prove
from tests.mutants import Harm


def test_every_harmful_mutant_is_reported_and_nothing_else() -> None:
    """Mutants of graphs, and as many of updates and of what joins graphs."""
    schedules = originals.hand_made(20, seed=1, stages=4) + originals.lined(12, seed=1)
    counts = prove.prove_verify(170, 1, schedules, of_steps=130)
    assert counts.missed == [] and counts.false_alarms == 0, str(counts)
    assert counts.step is not None
    for each in (counts, counts.step):
        assert each.of(Harm.WRONG, reported=True) > 25
        assert each.of(Harm.NONE, reported=False) > 15, "it does not report everything"
    assert len(counts.step.edits) > 18, "of every kind"
    # Without one kind of check, some would be missed: the mutants need what `verify` proves.
    seen = [*counts.kinds, *counts.step.kinds]
    for blind in (
        {HazardKind.READ_TOO_EARLY, HazardKind.WRITTEN_TOO_EARLY, HazardKind.WRONG_TOKEN},
        {HazardKind.NOT_UPDATED, HazardKind.WRONG_UPDATE, HazardKind.STATE_LOST},
        {HazardKind.SLOT_OVERWRITTEN, HazardKind.SLOT_REFILLED, HazardKind.BEFORE_BEGIN},
        {HazardKind.FREED_TOO_EARLY, HazardKind.USE_AFTER_FREE, HazardKind.DOUBLE_FREE},
        {HazardKind.GRADIENTS_LOST, HazardKind.WRONG_GRADIENTS, HazardKind.GRADIENTS_NOT_READY},
    ):
        assert any(kinds <= blind for kinds in seen), blind
