"""Finds the kernels of an ATen graph: their operations, the bytes they move, the memory they need.

    ATen graph  ->  kernels: matrix products | attention | scatters | groups of the rest, fused

[Note: fusion] Inductor calls libraries for matrix products and attention and operators of other
packages, and generates kernels for the rest. Elementwise nodes are computed in their readers. A
value is *realized*, written to memory, if a library call, the reader of a reduction or the caller
needs it. Realized nodes that no library call separates and that reduce in the same direction share
one kernel, which reads and writes only the values that cross its border. A value that depends on a
number reduced from a whole tensor (the scale of an fp8 cast) needs a second kernel. Without fusion
(lowering "eager") every node is a kernel.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from megacompile.cost import aten
from megacompile.cost.hardware import Hardware
from megacompile.ir import ops
from megacompile.ir.values import endings


class KernelBound(Enum):
    """The limiting resource of a kernel."""

    PRODUCT = "product"  # the matrix units, or memory for thin shapes
    ATTENTION = "attention"  # the matrix units at a lower rate, because of the softmax
    MEMORY = "memory"  # device memory


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: operations, bytes read and written."""

    kind: KernelBound
    flops: int
    size_bytes: int
    itemsize: int  # bytes of an operand's element: 1 (fp8), 2 or 4
    reached: float = 1.0  # share of the limiting rate that its size and access pattern allow

    def seconds(self, hardware: Hardware) -> float:
        """Time on a device, without overlap: the longer of operations and bytes at their rates,
        plus a launch."""
        moved_s = self.size_bytes / (hardware.memory_gb_s * 1e9)
        if self.kind is KernelBound.MEMORY:
            moved_s /= self.reached
        rate = hardware.matmul32_tflop_s if self.itemsize > 2 else hardware.matmul_tflop_s
        if self.itemsize == 1:
            rate = hardware.matmul8_tflop_s or rate
        attends = self.kind is KernelBound.ATTENTION
        rate *= hardware.attention_share if attends else hardware.sustained
        return max(self.flops / (rate * self.reached * 1e12), moved_s) + hardware.launch_s


@dataclass(frozen=True, slots=True)
class Returned:
    """The memory of a tensor that a graph returns."""

    memory: int  # equal for tensors that share it; negative: an input's
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """The kernels and the memory of compiled code."""

    kernels: tuple[Kernel, ...]
    peak_bytes: int  # allocated while it runs, including results
    returned: tuple[Returned | None, ...]
    _seconds: dict[Hardware, float] = field(default_factory=dict, init=False, compare=False)

    def seconds(self, hardware: Hardware) -> float:
        """Time on a device, without overlap between kernels."""
        if hardware not in self._seconds:
            self._seconds[hardware] = sum(kernel.seconds(hardware) for kernel in self.kernels)
        return self._seconds[hardware]


def analyse(graph: fx.Graph, *, fused: bool = True) -> Analysis:
    """Count the kernels of an ATen graph whose nodes have fake tensors as `meta["val"]`."""
    walk = _Walk(graph, fused)
    return Analysis(tuple(walk.kernels()), walk.peak_bytes(), tuple(walk.returned()))


Reads = dict[int, int]  # buffer -> bytes read from it


def _joined(each: Iterable[Reads]) -> Reads:
    """The reads of all together: from each buffer, the most that one of them reads."""
    found: Reads = {}
    for reads in each:
        for buffer, size in reads.items():
            found[buffer] = max(size, found.get(buffer, 0))
    return found


@dataclass(slots=True)
class _Op:
    """A realized node."""

    node: fx.Node
    reads: Reads
    writes: tuple[int, ...]
    level: int  # longest chain of library calls and full reductions up to it
    library: bool = False
    inner: bool = True  # reduces rows or nothing, so it can share a kernel with elementwise nodes
    flops: int = 0
    extra_bytes: int = 0  # beyond reading inputs and writing outputs once
    inside_bytes: int = 0  # allocated while it runs


Group = Sequence[_Op]  # nodes that share a kernel


class _Walk:
    """One pass over a graph: see [Note: fusion]. Buffers, values in memory, have numbers."""

    def __init__(self, graph: fx.Graph, fused: bool) -> None:
        self.graph, self.fused = graph, fused
        self.sizes: list[int] = []  # of buffers, bytes
        self.levels: list[int] = []  # of buffers: see `_Op`
        self.done: list[_Op] = []
        self.of: dict[fx.Node, Reads] = {}  # buffers that reading a node reads
        self.inputs: dict[int, int] = {}  # buffer -> index of the placeholder
        self.realized: dict[fx.Node, tuple[int, ...]] = {}  # -> its buffers
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                buffer = self._buffer(aten.bytes_of(aten.tensors_of(node)), 0)
                self.inputs[buffer] = len(self.inputs)
                self.of[node] = {buffer: self.sizes[buffer]}
            elif node.op == "call_function":
                self._visit(node)
        output = ops.returned(graph)
        values = output if isinstance(output, (tuple, list)) else (output,)
        self.results = [self.of[v] if isinstance(v, fx.Node) else {} for v in values]
        self.kept = {buffer for reads in self.results for buffer in reads}

    def _buffer(self, size_bytes: int, level: int) -> int:
        self.sizes.append(size_bytes)
        self.levels.append(level)
        return len(self.sizes) - 1

    def _visit(self, node: fx.Node) -> None:
        reads = _joined(self.of[source] for source in node.all_input_nodes)
        if node.target is operator.getitem:
            self.of[node] = self._item(node)
        elif aten.is_view(node):
            size = aten.bytes_of(aten.tensors_of(node))
            self.of[node] = {buffer: min(size, read) for buffer, read in reads.items()}
        elif aten.is_called(node):
            self._realize(
                node,
                reads,
                library=True,
                flops=aten.flops_of(node),
                extra_bytes=2 * aten.unpacked_bytes(node),
                inside_bytes=aten.workspace_bytes(node),
            )
        elif aten.scatters(node):
            self._realize(node, reads, library=True, extra_bytes=2 * aten.scattered_bytes(node))
        else:
            if aten.name_of(node) in aten.INDEXED:
                size = aten.bytes_of(aten.tensors_of(node))
                reads = {buffer: min(read, size) for buffer, read in reads.items()}
            needed = any(u.op == "output" or aten.is_library(u) for u in aten.readers_of(node))
            if aten.name_of(node) in aten.REDUCTIONS or not self.fused or needed:
                self._realize(node, reads, inner=not aten.reduces_columns(node))
            else:
                self.of[node] = reads

    def _item(self, node: fx.Node) -> Reads:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if source not in self.realized:  # computed in its readers
            return self.of[source]
        values = source.meta["val"]
        if not isinstance(values[index], torch.Tensor):  # an unneeded gradient is None
            return {}
        position = sum(isinstance(value, torch.Tensor) for value in values[:index])
        buffer = self.realized[source][position]
        return {buffer: self.sizes[buffer]}

    def _realize(self, node: fx.Node, reads: Reads, *, library: bool = False, **of: Any) -> None:
        level = max((self.levels[b] for b in reads), default=0) + library
        sizes = [aten.bytes_of([t]) for t in aten.tensors_of(node)]
        writes = tuple(self._buffer(size, level + aten.reduces_to_one(node)) for size in sizes)
        self.of[node] = dict(zip(writes, sizes, strict=True))
        self.realized[node] = writes
        self.done.append(_Op(node, reads, writes, level, library, **of))

    # The results.

    def kernels(self) -> Iterator[Kernel]:
        """The kernels: one per library call, and one per group of other nodes."""
        groups = self._groups()
        readers = Counter(b for group in groups for b in {b for op in group for b in op.reads})
        for group in groups:
            made = {buffer for op in group for buffer in op.writes}
            reads = _joined(op.reads for op in group)
            moved = sum(size for buffer, size in reads.items() if buffer not in made)
            moved += sum(
                self.sizes[b]
                for b in made
                if b in self.kept or group[0].library or readers[b] > (b in reads)
            )
            yield self._kernel(group, moved + sum(op.extra_bytes for op in group))

    def _kernel(self, group: Group, moved: int) -> Kernel:
        last = group[-1]
        kind, reached = KernelBound.MEMORY, 1.0
        if last.flops and aten.is_attention(last.node):
            kind, reached = KernelBound.ATTENTION, aten.reached_rate(last.node)
        elif last.flops:
            kind = KernelBound.PRODUCT
        elif self.fused:
            reached = min(aten.reached_in_columns(op.node) for op in group)
        return Kernel(kind, last.flops, moved, aten.itemsize_of(last.node), reached)

    def _groups(self) -> list[list[_Op]]:
        """Groups of realized nodes that share a kernel, in the order of their last node."""
        groups: list[list[_Op]] = []
        touching: dict[tuple[int, bool], dict[int, int]] = {}  # buffer -> group, by level and kind
        for op in self.done:
            if op.library or not self.fused:
                groups.append([op])
                continue
            near = touching.setdefault((op.level, op.inner), {})
            found = sorted({near[b] for b in (*op.reads, *op.writes) if b in near})
            home = found[0] if found else len(groups)
            if not found:
                groups.append([])
            for other in found[1:]:
                groups[home] += groups[other]
                groups[other] = []
                near.update({b: home for b, g in near.items() if g == other})
            groups[home].append(op)
            near.update({b: home for b in (*op.reads, *op.writes)})
        return [group for group in groups if group]

    def returned(self) -> Iterator[Returned | None]:
        """The memory of each result; None if it is not a tensor."""
        for reads in self.results:
            if not reads:
                yield None
                continue
            buffer = max(reads, key=self.sizes.__getitem__)
            memory = -1 - self.inputs[buffer] if buffer in self.inputs else buffer
            yield Returned(memory, self.sizes[buffer])

    def peak_bytes(self) -> int:
        """Peak memory of realized values, in Inductor's order of kernels. All inputs and outputs of
        a kernel's nodes are live at once; fused elementwise nodes reuse the buffers that they read.

            before: a, b -> y;  c, d -> z;  y * z -> x     at most y c d x
            after:  a, b, c, d -> y, z, x                  a b c d, of which two become y z, and x
        """
        groups = self._in_order(self._groups())
        used = [{b for op in group for b in (*op.reads, *op.writes)} for group in groups]
        live = peak = 0
        for group, ending in zip(groups, endings([*used, self.kept]), strict=False):
            written = {b for op in group for b in op.writes}
            dying = ending - self.inputs.keys()
            if self.fused and not group[0].library:  # values used only inside take no memory
                written, dying = written - dying, dying - written
            into = self._reused(group, dying - written)
            live += self._size(written) - self._size(into)
            peak = max(peak, live + max(op.inside_bytes for op in group))
            live -= self._size(dying - into)
        return peak

    def _size(self, buffers: Iterable[int]) -> int:
        return sum(self.sizes[b] for b in buffers)

    def _in_order(self, groups: Sequence[Group]) -> list[Group]:
        """Groups in the order of their first node, each after the writers of its inputs."""
        first = {id(op): i for i, op in enumerate(self.done)}
        waiting = sorted(groups, key=lambda group: first[id(group[0])], reverse=True)
        writer = {b: group for group in groups for op in group for b in op.writes}
        found: dict[int, Group] = {}
        begun: set[int] = set()
        while waiting:
            group = waiting[-1]
            if id(group) not in begun:
                begun.add(id(group))
                needs = [writer[b] for op in group for b in op.reads if b in writer]
                waiting += [need for need in needs if id(need) not in begun]
            else:
                found.setdefault(id(group), waiting.pop())
        return list(found.values())

    def _reused(self, group: Group, dying: set[int]) -> set[int]:
        """The buffers that a kernel reads last and writes into: for each output of a node, an input
        of equal size that no other node of the kernel reads."""
        if group[0].library or not self.fused:
            return set()
        readers = Counter(b for op in group for b in op.reads)
        reused: set[int] = set()
        for op in group:
            alone = [b for b in op.reads if readers[b] == 1 and b in dying]
            for size in (self.sizes[b] for b in op.writes):
                fits = [b for b in alone if self.sizes[b] == size and b not in reused]
                reused.update(fits[:1])
        return reused
