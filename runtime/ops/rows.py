"""A chunk of logits, row by row, for cross entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.ir.head import sum_dtype


@dataclass(frozen=True, slots=True)
class Rows:
    """A chunk of rows, and the sums over it."""

    logits: Tensor  # (rows, C)
    target: Tensor  # (rows,) int64, 0 where ignored
    valid: Tensor  # (rows,) bool: not ignored
    class_weight: Tensor | None  # (C,) in `sum_dtype`

    @staticmethod
    def of(logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Rows:
        valid = target != ignore_index
        target = torch.where(valid, target, 0)
        if target.device.type == "cpu":  # on CUDA gather asserts this
            for wrong in target[(target < 0) | (target >= logits.shape[1])][:1].tolist():
                raise IndexError(f"Target {wrong} is out of bounds.")  # torch's message
        if class_weight is not None:
            class_weight = class_weight.to(sum_dtype(logits.dtype))
        return Rows(logits, target, valid, class_weight)

    def coefficients(self, label_smoothing: float) -> tuple[Tensor, Tensor]:
        """a and b of the formula, (rows,) each."""
        one = self.valid.to(sum_dtype(self.logits.dtype))
        weight = one if self.class_weight is None else self.class_weight[self.target] * one
        return weight * (1 - label_smoothing), one * (label_smoothing / self.logits.shape[1])

    @property
    def weight_sum(self) -> Tensor | float:
        """w of the formula."""
        classes = float(self.logits.shape[1])
        return classes if self.class_weight is None else self.class_weight.sum()
