"""Outputs of a captured graph that will get a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule


def computed_outputs(outputs: Sequence[Any]) -> list[int]:
    """Positions of the outputs that stages compute, each value once."""
    first: dict[fx.Node, int] = {}
    for k, node in enumerate(outputs):
        if isinstance(node, fx.Node) and node.op != "placeholder":
            first.setdefault(node, k)
    return list(first.values())


def expected_tangents(stages: Schedule) -> tuple[int, ...]:
    """The outputs that will get a gradient: a scalar loss alone, or else all that can.

    A guess, made before the first backward; a backward that differs corrects it.
    """
    outputs, _ = ops.returned(stages.forward)
    able = able_tangents(stages)
    return tuple([k for k in able if outputs[k].meta["value"].shape == ()][:1] or able)


def able_tangents(stages: Schedule) -> tuple[int, ...]:
    """The outputs that can get a gradient."""
    outputs, _ = ops.returned(stages.forward)
    metas = {k: outputs[k].meta["value"] for k in computed_outputs(outputs)}
    return tuple(k for k, m in metas.items() if m.requires_grad and _is_differentiable(m.dtype))


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
