"""Plan the stages of a captured graph for other values of its symbols.

    before: f32[8, 128] (8 x n0)        after: f32[8, 256] (8 x n0)

Nothing but what is planned for changes: the stages are the same, and have the same code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megacompile.ir.schedule import Schedule
from megacompile.ir.symbols import Number, Values
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.stages.templates import with_stages


def resize(stages: Schedule, values: Values) -> Schedule:
    """The result of `partition`, planned for these values of all its symbols."""
    assert stages.symbols is not None
    new = with_stages(
        stages,
        tuple(
            replace(
                stage,
                metas=tuple(meta.at(values) for meta in stage.metas),
                outputs=tuple(meta.at(values) for meta in stage.outputs),
            )
            for stage in stages.stages
        ),
    )
    for node in new.forward.nodes:
        if "value" in node.meta:
            node.meta["value"] = _at(node.meta["value"], values)
    return replace(new, symbols=replace(stages.symbols, planned=dict(values)))


def _at(value: Any, values: Values) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(item, values) for item in value)
    return value.at(values) if isinstance(value, (TensorMeta, Number)) else value
