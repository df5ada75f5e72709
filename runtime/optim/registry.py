"""The optimizers that can update streamed parameters, one per file.

To add an optimizer, write its file and list it here; see `rule.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from megacompile.runtime.optim import adafactor, adam, lion, muon, sgd
from megacompile.runtime.optim.rule import KnownOptimizer, OptimizerRule

KNOWN: tuple[KnownOptimizer, ...] = (adam.ADAM, sgd.SGD, lion.LION, muon.MUON, adafactor.ADAFACTOR)
RULES = tuple(known for known in KNOWN if isinstance(known, OptimizerRule))


_BY_CLASS: dict[type | str, KnownOptimizer] = {kind: each for each in KNOWN for kind in each.types}


def known(kind: type[Optimizer]) -> KnownOptimizer | None:
    """The entry for a class of optimizers; None: their own step updates, on the host."""
    return _BY_CLASS.get(kind) or _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")


def rule_of(optimizer: Optimizer) -> OptimizerRule | None:
    """The rule of an optimizer, if it has one."""
    entry = known(type(optimizer))
    return entry if isinstance(entry, OptimizerRule) else None


def listed(optimizers: Sequence[KnownOptimizer], last: str = "and") -> str:
    """The names of the optimizers' classes: "AdamW, Adam and SGD"."""
    names = [name for each in optimizers for name in each.names]
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
