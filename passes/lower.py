"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the ATen graph as it is, bitwise equal to the plain model. `INDUCTOR` compiles it with
TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from megacompile import compat, ops
from megacompile.ir import Code, LoweredFn, Schedule, Template
from megacompile.options import Lowering

Progress = Callable[[Iterable[tuple[Template, Code]], int], Iterable[tuple[Template, Code]]]


def lower(schedule: Schedule, *, lowering: Lowering, progress: Progress) -> Schedule:
    """The same schedule; its templates' `code` holds everything that its nodes run."""
    wanted = [
        (template, code)
        for template, code in dict.fromkeys(_runs(schedule))
        if code not in template.code
    ]
    for template, code in progress(wanted, len(wanted)):
        template.code[code] = _lower(template.graphs[code], lowering)
    return schedule


def _runs(schedule: Schedule) -> Iterable[tuple[Template, Code]]:
    for graph in schedule.graphs.values():
        for node in ops.nodes_of(graph, ops.forward, ops.recompute, ops.backward):
            yield node.args[0].traced, code_of(node)  # type: ignore[union-attr]


def code_of(node: fx.Node) -> Code:
    """Which piece of its template a compute node runs."""
    if node.target is ops.forward:
        return Code.FORWARD_SAVING if node.args[3] else Code.FORWARD
    return Code.RECOMPUTE if node.target is ops.recompute else Code.BACKWARD


def _lower(module: fx.GraphModule, lowering: Lowering) -> LoweredFn:
    computes = any(node.op == "call_function" for node in module.graph.nodes)
    if lowering is Lowering.EAGER or not computes:
        return _Eager(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    function = compat.compile_inductor(module, [node.meta["val"] for node in placeholders])
    return lambda inputs: function(*inputs)


class _Eager:
    """Runs an ATen graph as it is.

    [Note: strides that lie]
    A few operators give other strides than their fake kernels say (a functionalized BatchNorm of
    a transposed input), and a `view` traced after them then fails. The first run checks each
    result; a copy to the traced strides is inserted where they differ.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.settled = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if not self.settled:
            return self._settle(inputs)
        result: Sequence[torch.Tensor | None] = self.module.forward(*inputs)
        return result

    def _settle(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        interpreter = _StrideChecker(self.module)
        result: Sequence[torch.Tensor | None] = interpreter.run(*inputs)
        for node, stride in interpreter.corrected.items():
            with self.module.graph.inserting_after(node):
                copy = self.module.graph.call_function(_restride, (node, stride))
            node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)  # noqa: B023
        self.module.recompile()
        self.settled = True
        return result


class _StrideChecker(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.corrected: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        traced = n.meta.get("val")
        if n.op != "call_function" or not isinstance(result, torch.Tensor) or traced is None:
            return result
        wanted = tuple(int(step) for step in traced.stride())
        if _same_layout(result, wanted):
            return result
        self.corrected[n] = wanted
        return _restride(result, wanted)


def _same_layout(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    sizes_and_steps = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in sizes_and_steps)


def _restride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values with the strides that the graph was traced with."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
