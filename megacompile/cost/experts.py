"""Counts a model's active parameters per token, without the experts that the token does not choose.

A grouped product multiplies each row by its expert's matrix: (rows, k) by (experts, k, n). So does
a gather of a matrix for each row, `weight[expert_ids]`. Of such a parameter, the share rows /
(tokens * experts) is active. Every other parameter counts fully, as in the usual 6 N T.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from megacompile.cost.aten import is_grouped, is_view, name_of, tensors_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, ParamRef, Stage

_CASTS = set("convert_element_type _to_copy clone".split())
_GATHERS = set("index index_select".split())
_LEAST_DIMENSIONS = 3  # of a parameter that holds one matrix per expert


def active_parameters(schedules: Iterable[Schedule], parameters: int, tokens: int) -> int:
    """The number of a model's parameters that are active for a token.

    Args:
        schedules: of all its captured graphs.
        parameters: number of all parameters.
        tokens: per step.
    """
    shares: dict[tuple[int, int], tuple[int, float]] = {}  # (bucket, index) -> elements, share
    for schedule in schedules:
        for stage in schedule.stages:
            for ref, rows in _expert_reads(stage):
                bucket = stage.buckets[ref.bucket]
                param = bucket.params[ref.param]
                place = bucket.key, ref.param
                share = rows / (tokens * param.shape[0]) + shares.get(place, (0, 0.0))[1]
                shares[place] = param.numel, min(1.0, share)
    return parameters - round(sum(numel * (1.0 - share) for numel, share in shares.values()))


def _expert_reads(stage: Stage) -> Iterator[tuple[ParamRef, int]]:
    """The expert parameters that a stage reads, each with the number of rows."""
    graphs = stage.traced.graphs
    module = graphs.get(Code.FORWARD) or graphs.get(Code.FORWARD_SAVING)
    if module is None:
        return
    refs = dict(zip(module.graph.find_nodes(op="placeholder"), stage.primals, strict=False))
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if is_grouped(node):
            rows, weight = node.args[:2]
        elif name_of(node) in _GATHERS:
            rows, weight = node, node.args[0]
        else:
            continue
        if not isinstance(rows, fx.Node) or not isinstance(weight, fx.Node):
            continue
        ref = refs.get(_source(weight))
        if isinstance(ref, ParamRef) and tensors_of(weight)[0].dim() >= _LEAST_DIMENSIONS:
            yield ref, int(tensors_of(rows)[0].shape[0])


def _source(node: fx.Node) -> fx.Node:
    """The value that views and casts start from."""
    while node.op == "call_function" and (is_view(node) or name_of(node) in _CASTS):
        before = node.args[0]
        if not isinstance(before, fx.Node):
            break
        node = before
    return node
