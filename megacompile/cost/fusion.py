"""Finds the kernels of an ATen graph: their operations, the bytes they move, the memory they need.

    ATen graph  ->  kernels: matrix products | attention | scatters | groups of the rest, fused

[Note: fusion] Inductor calls libraries for matrix products and attention, calls operators of other
packages directly, and generates kernels for the rest. Elementwise nodes cost nothing by themselves
because they are computed in their readers. A value is *realized*, written to memory, if a library
call, the reader of a reduction or the caller needs it, or if several readers would repeat too much
work. Realized nodes that no library call separates and that reduce in the same direction share one
kernel, which reads and writes only the values that cross its border. A value that depends on a
number reduced from a whole tensor (the scale of an fp8 cast) needs a second kernel, which reads
that tensor again. Without fusion (lowering "eager") every node is a kernel.

[Note: instructions] Elementwise nodes are computed in every kernel that reads them. With many or
slow ones, such as casts to fp8 after silu, a kernel is bound by its instructions and not by its
bytes. A kernel that reduces long rows and then uses the result passes over them twice, the second
time from the cache, and computes everything twice.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from megacompile.cost.aten import (
    INDEXED,
    REDUCTIONS,
    bytes_of,
    flops_of,
    instructions_of,
    is_attention,
    is_called,
    is_library,
    is_view,
    itemsize_of,
    name_of,
    reached_in_columns,
    reached_rate,
    readers_of,
    reduces_columns,
    reduces_long_rows,
    reduces_to_one,
    scattered_bytes,
    scatters,
    tensors_of,
    unpacked_bytes,
    workspace_bytes,
)
from megacompile.cost.roofline import Analysis, Kernel, KernelBound, Returned
from megacompile.ir import ops
from megacompile.ir.liveness import endings

_MANY_READS = 4  # Inductor's realize_reads_threshold
_INSTRUCTIONS_A_BYTE = 1.5  # to load or store 16-bit elements, including addresses


def analyse(graph: fx.Graph, *, fused: bool = True) -> Analysis:
    """Count the kernels of an ATen graph whose nodes have fake tensors as `meta["val"]`."""
    walk = _Walk(graph, fused)
    return Analysis(tuple(walk.kernels()), walk.peak_bytes(), tuple(walk.returned()))


Reads = dict[int, int]  # buffer -> bytes read from it


@dataclass(slots=True)
class _Buffer:
    """A value in memory."""

    size_bytes: int
    level: int  # longest chain of library calls and full reductions before it


@dataclass(slots=True)
class _Op:
    """A realized node."""

    node: fx.Node
    reads: Reads
    writes: tuple[int, ...]
    library: bool
    level: int
    inner: bool  # reduces rows or nothing, so it can share a kernel with elementwise nodes
    inlined: frozenset[fx.Node] = frozenset()  # elementwise nodes computed in it
    flops: int = 0
    extra_bytes: int = 0  # beyond reading inputs and writing outputs once
    inside_bytes: int = 0  # allocated while it runs


Group = Sequence[_Op]  # nodes that share a kernel
Reused = Callable[[Group, set[int]], set[int]]


@dataclass(slots=True)
class _Walk:
    """One pass over a graph: see [Note: fusion]."""

    graph: fx.Graph
    fused: bool
    buffers: list[_Buffer] = field(default_factory=list)
    done: list[_Op] = field(default_factory=list)
    of: dict[fx.Node, Reads] = field(default_factory=dict)  # buffers that reading a node reads
    inlined: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)  # computed with it
    inputs: dict[int, int] = field(default_factory=dict)  # buffer -> index of the placeholder
    realized: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # -> its buffers

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                buffer = self._buffer(bytes_of(tensors_of(node)), 0)
                self.inputs[buffer] = len(self.inputs)
                self.of[node] = {buffer: self.buffers[buffer].size_bytes}
            elif node.op == "call_function":
                self._visit(node)

    def _buffer(self, size_bytes: int, level: int) -> int:
        self.buffers.append(_Buffer(size_bytes, level))
        return len(self.buffers) - 1

    def _visit(self, node: fx.Node) -> None:
        reads: Reads = {}
        for source in node.all_input_nodes:
            for buffer, size in self.of[source].items():
                reads[buffer] = max(size, reads.get(buffer, 0))
        if node.target is operator.getitem:
            self.of[node] = self._item(node)
            self.inlined[node] = self._inlined_by(node)
        elif is_view(node):
            size = bytes_of(tensors_of(node))
            self.of[node] = {buffer: min(size, read) for buffer, read in reads.items()}
            self.inlined[node] = self._inlined_by(node)
        elif is_called(node):
            self._realize(
                node,
                reads,
                library=True,
                flops=flops_of(node),
                extra_bytes=2 * unpacked_bytes(node),
                inside_bytes=workspace_bytes(node),
            )
        elif scatters(node):
            extra = 2 * scattered_bytes(node)
            self._realize(node, reads, library=True, extra_bytes=extra)
        else:
            self._elementwise(node, reads)

    def _item(self, node: fx.Node) -> Reads:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        made = self.realized.get(source)
        if made is None:  # computed in its readers
            return self.of[source]
        values = source.meta["val"]
        if not isinstance(values[index], torch.Tensor):  # an unneeded gradient is None
            return {}
        buffer = made[sum(isinstance(value, torch.Tensor) for value in values[:index])]
        return {buffer: self.buffers[buffer].size_bytes}

    def _elementwise(self, node: fx.Node, reads: Reads) -> None:
        size = bytes_of(tensors_of(node))
        inlined = self._inlined_by(node) | {node}
        reduces = name_of(node) in REDUCTIONS
        if name_of(node) in INDEXED:
            reads = {buffer: min(read, size) for buffer, read in reads.items()}
        if reduces or not self.fused or self._must_realize(node, reads):
            inner = not reduces_columns(node)
            self._realize(node, reads, library=False, inner=inner, inlined=inlined)
        else:
            self.of[node] = reads
            self.inlined[node] = inlined

    def _inlined_by(self, node: fx.Node) -> frozenset[fx.Node]:
        """The elementwise nodes that every reader of a node's inputs computes."""
        each = (self.inlined.get(source, frozenset()) for source in node.all_input_nodes)
        return frozenset().union(*each)

    def _must_realize(self, node: fx.Node, reads: Reads) -> bool:
        users = list(readers_of(node))
        if any(u.op == "output" or is_library(u) for u in users):
            return True
        return len(users) > 1 and len(reads) > _MANY_READS

    def _realize(
        self,
        node: fx.Node,
        reads: Reads,
        *,
        library: bool,
        inner: bool = True,
        inlined: frozenset[fx.Node] = frozenset(),
        flops: int = 0,
        extra_bytes: int = 0,
        inside_bytes: int = 0,
    ) -> None:
        level = max((self.buffers[b].level for b in reads), default=0) + (1 if library else 0)
        sizes = [bytes_of([t]) for t in tensors_of(node)]
        behind = level + 1 if reduces_to_one(node) else level
        writes = tuple(self._buffer(size, behind) for size in sizes)
        self.of[node] = dict(zip(writes, sizes, strict=True))
        self.realized[node] = writes
        amounts = (flops, extra_bytes, inside_bytes)
        self.done.append(_Op(node, reads, writes, library, level, inner, inlined, *amounts))

    # The results.

    def kernels(self) -> Iterator[Kernel]:
        """The kernels: one per library call, and one per group of other nodes."""
        readers: dict[int, set[int]] = {}  # buffer -> kernels that read it
        groups = self._groups()
        for k, group in enumerate(groups):
            for op in group:
                for buffer in op.reads:
                    readers.setdefault(buffer, set()).add(k)
        kept = {b for read in self._returned_reads() for b in read}
        for k, group in enumerate(groups):
            made = {buffer for op in group for buffer in op.writes}
            reads: Reads = {}
            for op in group:
                for buffer, size in op.reads.items():
                    reads[buffer] = max(size, reads.get(buffer, 0))
            moved = sum(size for buffer, size in reads.items() if buffer not in made)
            moved += sum(
                self.buffers[b].size_bytes
                for b in made
                if b in kept or group[0].library or readers.get(b, set()) - {k}
            )
            moved += sum(op.extra_bytes for op in group)
            yield self._kernel(group, moved)

    def _kernel(self, group: Group, moved: int) -> Kernel:
        last = group[-1]
        kind, reached = KernelBound.MEMORY, 1.0
        if last.flops and is_attention(last.node):
            kind, reached = KernelBound.ATTENTION, reached_rate(last.node)
        elif last.flops:
            kind = KernelBound.PRODUCT
        elif self.fused:
            reached = min(reached_in_columns(op.node) for op in group)
        itemsize, instructions = itemsize_of(last.node), _instructions(group, moved)
        return Kernel(last.node.name, kind, last.flops, moved, itemsize, reached, instructions)

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

    def _returned_reads(self) -> list[Reads]:
        found = ops.returned(self.graph)
        values = found if isinstance(found, (tuple, list)) else (found,)
        return [self.of[v] if isinstance(v, fx.Node) else {} for v in values]

    def returned(self) -> Iterator[Returned | None]:
        for reads in self._returned_reads():
            if not reads:
                yield None
                continue
            buffer = max(reads, key=lambda b: self.buffers[b].size_bytes)
            known = self.inputs.get(buffer)
            memory = buffer if known is None else -1 - known
            yield Returned(memory, self.buffers[buffer].size_bytes)

    def peak_bytes(self) -> int:
        """Peak memory of realized values, the larger of program order and fused order.

        Fused elementwise nodes reuse the buffers that they read. Kernels run in Inductor's order;
        the inputs and outputs of a kernel's nodes are all live at once.

            before: a, b -> y;  c, d -> z;  y * z -> x     at most y c d x
            after:  a, b, c, d -> y, z, x                  a b c d, of which two become y z, and x
        """
        alone = [[op] for op in self.done]
        if not self.fused:
            return self._peak(alone, lambda _, __: set())
        peak = self._peak(alone, lambda group, dying: set() if group[0].library else dying)
        return max(peak, self._peak(self._in_order(self._groups()), self._reused, inner=True))

    def _peak(self, groups: Sequence[Group], reused: Reused, *, inner: bool = False) -> int:
        """Peak memory of kernels in sequence.

        Args:
            reused: returns the buffers that a kernel reads last and writes into.
            inner: values used only inside a kernel take no memory.
        """
        used = [{b for op in group for b in (*op.reads, *op.writes)} for group in groups]
        returned = {b for reads in self._returned_reads() for b in reads}
        live = peak = 0
        for group, ending in zip(groups, endings([*used, returned]), strict=False):
            written = {b for op in group for b in op.writes}
            dying = ending - self.inputs.keys()
            if inner and not group[0].library:
                written, dying = written - dying, dying - written
            into = reused(group, dying - written)
            live += self._size(written) - self._size(into)
            peak = max(peak, live + max(op.inside_bytes for op in group))
            live -= self._size(dying - into)
        return peak

    def _size(self, buffers: Iterable[int]) -> int:
        return sum(self.buffers[b].size_bytes for b in buffers)

    def _in_order(self, groups: Sequence[Group]) -> list[Group]:
        """Groups in the order of their first node, each after the writers of its inputs."""
        first = {id(op): i for i, op in enumerate(self.done)}
        waiting = sorted(groups, key=lambda group: first[id(group[0])], reverse=True)
        writer = {b: group for group in groups for op in group for b in op.writes}
        found: list[Group] = []
        begun: set[int] = set()
        ended: set[int] = set()
        while waiting:
            group = waiting[-1]
            if id(group) not in begun:
                begun.add(id(group))
                needs = [writer[b] for op in group for b in op.reads if b in writer]
                waiting += [need for need in needs if id(need) not in begun]
                continue
            waiting.pop()
            if id(group) not in ended:
                ended.add(id(group))
                found.append(group)
        return found

    def _reused(self, group: Group, dying: set[int]) -> set[int]:
        """The buffers that a kernel reads last and writes into: for each output of a node, an input
        of equal size that no other node of the kernel reads."""
        if group[0].library:
            return set()
        readers = Counter(b for op in group for b in op.reads)
        reused: set[int] = set()
        for op in group:
            alone = [b for b in op.reads if readers[b] == 1 and b in dying]
            for size in (self.buffers[b].size_bytes for b in op.writes):
                fits = (b for b in alone if self.buffers[b].size_bytes == size)
                reused.update(next(([b] for b in fits if b not in reused), []))
        return reused


def _instructions(group: Group, moved: int) -> int:
    """Instructions of a generated kernel: see [Note: instructions]."""
    if group[0].library:
        return 0
    reduced = {b for op in group if op.inner and reduces_long_rows(op.node) for b in op.writes}
    passes = 2 if any(reduced.intersection(op.reads) for op in group) else 1
    nodes = frozenset[fx.Node]().union(*(op.inlined for op in group))
    return int(passes * (sum(map(instructions_of, nodes)) + _INSTRUCTIONS_A_BYTE * moved))
