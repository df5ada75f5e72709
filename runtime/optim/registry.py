"""The optimizers that can update streamed parameters: the rules, one per file, and those whose own
step runs on the device, because their update is not elementwise.

    Muon        needs matrix products. Source: Jordan et al., "Muon: An optimizer for hidden layers
                in neural networks", 2024
    Adafactor   needs means over rows and columns. Source: Shazeer & Stern, "Adafactor: Adaptive
                Learning Rates with Sublinear Memory Cost", 2018, arXiv 1804.04235

To add an optimizer, write its file (see `rule.py`), or its `OwnStep` here, and list it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.lion import LION
from megacompile.runtime.optim.rule import Group, KnownOptimizer, Moment, OptimizerRule, OwnStep
from megacompile.runtime.optim.sgd import SGD


class _Adafactor(OwnStep):
    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        if len(shape) < 2:
            return (("variance", shape),)
        return (("row_var", (*shape[:-1], 1)), ("col_var", (*shape[:-2], 1, shape[-1])))


MUON = OwnStep(
    types=(torch.optim.Muon,),
    counts=False,
    moments=(Moment("momentum_buffer", option="momentum", late=True),),
    takes_dtensors=True,
)
ADAFACTOR = _Adafactor(
    types=(torch.optim.Adafactor,),
    counts=True,
    takes_dtensors=False,  # its step squares a norm in place, which DTensor does not support
)
RULES = (ADAM, SGD, LION)
KNOWN: tuple[KnownOptimizer, ...] = (*RULES, MUON, ADAFACTOR)
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
