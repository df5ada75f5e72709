"""Find the kernels of an ATen graph: their operations, the bytes they move, the memory they need.

    ATen graph  ->  kernels: matrix products | attention | scatters | groups of the rest, fused
    kernel      ->  seconds: the larger of operations / rate and bytes / bandwidth, plus a launch

[Note: fusion] Inductor calls libraries for matrix products and attention and writes kernels for
the rest. Elementwise nodes cost nothing by themselves: they are part of whoever reads them. A
value is *realized*, written to memory, where a library, a reduction's reader or the caller needs
it, or where several readers would repeat too much. Realized nodes that no library call separates,
and that reduce in the same direction, share one kernel, which reads and writes only what crosses
its border. Without fusion (lowering "eager") every node is a kernel.

Operations are counted as torch.utils.flop_counter does. A library that is told that attention is
causal skips half of it. Attention comes closer to its rate the longer its sequences are, and its
backward adds up the queries' gradients in float32, in memory of its own (Dao, FlashAttention-2,
2023, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megacompile import compat
from megacompile.cost.hardware import Hardware
from megacompile.ir import ops


class Kind(Enum):
    """What limits a kernel."""

    PRODUCT = "product"  # the matrix units, or memory where it is thin
    ATTENTION = "attention"  # the matrix units, at a lower rate: softmax runs between
    MEMORY = "memory"  # device memory


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: operations, bytes read and written."""

    name: str  # of the node that it ends with
    kind: Kind
    flops: int
    size_bytes: int
    half: bool  # 16-bit operands
    reached: float = 1.0  # of the rate, for its size

    def seconds(self, hardware: Hardware) -> float:
        """On a device, one kernel after the other."""
        moved = self.size_bytes / (hardware.memory_gb_s * 1e9)
        return max(self.flops / self._rate(hardware), moved) + hardware.launch_s

    def _rate(self, hardware: Hardware) -> float:
        rate = hardware.matmul_tflop_s if self.half else hardware.matmul32_tflop_s
        share = hardware.attention_share if self.kind is Kind.ATTENTION else hardware.sustained
        return rate * share * self.reached * 1e12


class Work(NamedTuple):
    """The sums over a piece of code."""

    flops: int  # of matrix products and attention
    size_bytes: int  # through device memory
    kernels: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The memory behind one tensor that a graph returns."""

    memory: int  # equal for tensors that share it; negative: an input's
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """What `analyse` finds in a graph."""

    kernels: tuple[Kernel, ...]
    peak_bytes: int  # the most that is allocated while it runs, what it returns included
    returned: tuple[Returned | None, ...]

    @property
    def work(self) -> Work:
        return Work(
            sum(kernel.flops for kernel in self.kernels),
            sum(kernel.size_bytes for kernel in self.kernels),
            len(self.kernels),
        )

    def seconds(self, hardware: Hardware) -> float:
        return sum(kernel.seconds(hardware) for kernel in self.kernels)


def analyse(graph: fx.Graph, *, fused: bool = True) -> Analysis:
    """Count the kernels of an ATen graph whose nodes have fake tensors as `meta["val"]`."""
    walk = _Walk(graph, fused)
    return Analysis(tuple(walk.kernels()), walk.peak_bytes(), tuple(walk.returned()))


# Which node is what.

_VIEWS = set(
    "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select alias "
    "detach as_strided split split_with_sizes unbind diagonal view_as unfold lift_fresh".split()
)
_REDUCTIONS = set(
    "sum mean amax amin max min argmax argmin prod var var_mean std any all logsumexp norm "
    "cumsum _softmax _log_softmax native_layer_norm native_group_norm".split()
)
_INDEXED = set("embedding gather index index_select _unsafe_index _unsafe_masked_index".split())
_SCATTERS = set(
    "index_put _unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_add "
    "scatter_reduce index_add embedding_dense_backward".split()
)
_LIBRARY = set("sort topk nonzero masked_scatter native_dropout_backward".split())
_MANY_READS = 4  # Inductor's realize_reads_threshold


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))


def _is_attention(node: fx.Node) -> bool:
    """Of the forms (batch, heads, length, width): what others take is not known by their names."""
    of_aten = getattr(node.target, "namespace", None) == "aten"
    return of_aten and "scaled_dot_product" in _name(node)


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry or "mm" in _name(node)


def _is_view(node: fx.Node) -> bool:
    return _name(node) in _VIEWS or node.target is operator.getitem


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)


def _flops(node: fx.Node) -> int:
    """Operations of a matrix product or of attention; 0 for what the registry does not know."""
    if _is_attention(node):
        return _attention_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _attention_flops(node: fx.Node) -> int:
    """Of the forms (batch, heads, length, width); backward: with the forward's products again."""
    query, key, value = (tuple(tensor.shape) for tensor in _attended(node))
    heads = (*query[:2],)
    key, value = (*heads, *key[2:]), (*heads, *value[2:])  # grouped heads are read, not saved
    if _is_backward(node):
        flops = sdpa_backward_flop_count(query, query[:3] + value[3:], key, value)
    else:
        flops = sdpa_flop_count(query, key, value)
    return int(flops) // 2 if _is_causal(node) else int(flops)


def _is_causal(node: fx.Node) -> bool:
    return bool(dict(compat.arguments_of(node)).get("is_causal"))


_HALF_RATE_LENGTH = 900  # of attention: between 1024 and 131072 tokens on an H200


def _reached(node: fx.Node) -> float:
    """Of the rate that attention gets with long sequences."""
    length = int(_attended(node)[0].shape[-2])
    return length / (length + _HALF_RATE_LENGTH)


def _workspace_bytes(node: fx.Node) -> int:
    """Memory inside of a library call."""
    backward = _is_attention(node) and _is_backward(node)
    return 4 * math.prod(_attended(node)[0].shape) if backward else 0


def _attended(node: fx.Node) -> list[torch.Tensor]:
    """Query, key and value of an attention; a backward takes the gradient before them."""
    start = 1 if _is_backward(node) else 0
    inputs = [a for a in node.args[start : start + 3] if isinstance(a, fx.Node)]
    return [_tensors(n)[0] for n in inputs]


def _is_backward(node: fx.Node) -> bool:
    return "backward" in _name(node)


Reads = dict[int, int]  # buffer -> bytes that are read of it


@dataclass(slots=True)
class _Buffer:
    """A value in memory."""

    size_bytes: int
    level: int  # library calls on the longest way to it
    internal: bool


@dataclass(slots=True)
class _Op:
    """A node that is realized, in program order."""

    node: fx.Node
    reads: Reads
    writes: tuple[int, ...]
    library: bool
    level: int
    inner: bool  # reduces rows, or nothing: can share a kernel with elementwise nodes
    flops: int = 0
    extra_bytes: int = 0  # beyond what is read and written once
    inside_bytes: int = 0  # that are allocated while it runs


@dataclass(slots=True)
class _Walk:
    """One pass over a graph: see [Note: fusion]."""

    graph: fx.Graph
    fused: bool
    buffers: list[_Buffer] = field(default_factory=list)
    done: list[_Op] = field(default_factory=list)
    of: dict[fx.Node, Reads] = field(default_factory=dict)  # what reading a node reads
    inputs: dict[int, int] = field(default_factory=dict)  # buffer -> index of the placeholder
    realized: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # -> its buffers

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                buffer = self._buffer(_bytes(_tensors(node)), 0, internal=False)
                self.inputs[buffer] = len(self.inputs)
                self.of[node] = {buffer: self.buffers[buffer].size_bytes}
            elif node.op == "call_function":
                self._visit(node)

    def _buffer(self, size_bytes: int, level: int, *, internal: bool) -> int:
        self.buffers.append(_Buffer(size_bytes, level, internal))
        return len(self.buffers) - 1

    def _visit(self, node: fx.Node) -> None:
        reads: Reads = {}
        for source in node.all_input_nodes:
            for buffer, size in self.of[source].items():
                reads[buffer] = max(size, reads.get(buffer, 0))
        if node.target is operator.getitem:
            self.of[node] = self._item(node)
        elif _is_view(node):
            size = _bytes(_tensors(node))
            self.of[node] = {buffer: min(size, read) for buffer, read in reads.items()}
        elif _is_product(node) or _is_attention(node) or _name(node) in _LIBRARY:
            inside = _workspace_bytes(node)
            self._realize(node, reads, library=True, flops=_flops(node), inside_bytes=inside)
        elif _name(node) in _SCATTERS and not self._scatters_into_constant(node):
            values = node.args[-1] if isinstance(node.args[-1], fx.Node) else None
            extra = 2 * _bytes(_tensors(values)) if values is not None else 0
            self._realize(node, reads, library=True, extra_bytes=extra)
        else:
            self._elementwise(node, reads)

    def _item(self, node: fx.Node) -> Reads:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        made = self.realized.get(source)
        if made is None:  # part of whoever reads it
            return self.of[source]
        return {made[index]: self.buffers[made[index]].size_bytes} if index < len(made) else {}

    @staticmethod
    def _scatters_into_constant(node: fx.Node) -> bool:
        """`scatter(full(...), index, value)` is a comparison with the index."""
        base = node.args[0]
        return (
            _name(node) == "scatter"
            and isinstance(base, fx.Node)
            and _name(base) in ("full", "zeros", "scalar_tensor")
        )

    def _elementwise(self, node: fx.Node, reads: Reads) -> None:
        size = _bytes(_tensors(node))
        reduces = _name(node) in _REDUCTIONS
        if _name(node) in _INDEXED:
            reads = {buffer: min(read, size) for buffer, read in reads.items()}
        if reduces or not self.fused or self._must_realize(node, reads):
            self._realize(node, reads, library=False, inner=not _reduces_columns(node))
        else:
            self.of[node] = reads

    def _must_realize(self, node: fx.Node, reads: Reads) -> bool:
        users = list(_users(node))
        if any(u.op == "output" or self._is_library(u) for u in users):
            return True
        return len(users) > 1 and len(reads) > _MANY_READS

    def _is_library(self, node: fx.Node) -> bool:
        if _is_product(node) or _is_attention(node) or _name(node) in _LIBRARY:
            return True
        return _name(node) in _SCATTERS and not self._scatters_into_constant(node)

    def _realize(
        self,
        node: fx.Node,
        reads: Reads,
        *,
        library: bool,
        inner: bool = True,
        flops: int = 0,
        extra_bytes: int = 0,
        inside_bytes: int = 0,
    ) -> None:
        level = max((self.buffers[b].level for b in reads), default=0) + (1 if library else 0)
        sizes = [_bytes([t]) for t in _tensors(node)]
        writes = tuple(self._buffer(size, level, internal=True) for size in sizes)
        self.of[node] = dict(zip(writes, sizes, strict=True))
        self.realized[node] = writes
        amounts = (flops, extra_bytes, inside_bytes)
        self.done.append(_Op(node, reads, writes, library, level, inner, *amounts))

    # The results.

    def kernels(self) -> Iterator[Kernel]:
        """Library calls as they are; the others in groups."""
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

    def _kernel(self, group: Sequence[_Op], moved: int) -> Kernel:
        last = group[-1]
        kind = Kind.MEMORY
        if last.flops:
            kind = Kind.ATTENTION if _is_attention(last.node) else Kind.PRODUCT
        operands = [t for n in last.node.all_input_nodes for t in _tensors(n)]
        half = any(t.dtype in (torch.bfloat16, torch.float16) for t in operands)
        reached = _reached(last.node) if kind is Kind.ATTENTION else 1.0
        return Kernel(last.node.name, kind, last.flops, moved, half, reached)

    def _groups(self) -> list[list[_Op]]:
        """Realized nodes that share a kernel, in the order of their last node."""
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
        """The most that realized values take at once; elementwise nodes reuse what they read."""
        last: dict[int, int] = {}
        for i, op in enumerate(self.done):
            last.update({b: i for b in (*op.reads, *op.writes)})
        for reads in self._returned_reads():
            last.update({b: len(self.done) for b in reads})
        live = peak = 0
        for i, op in enumerate(self.done):
            dying = [b for b in last if last[b] == i and self.buffers[b].internal]
            before = [b for b in dying if b not in op.writes]
            freed = sum(self.buffers[b].size_bytes for b in before)
            made = sum(self.buffers[b].size_bytes for b in op.writes)
            live += made - (0 if op.library else freed)
            peak = max(peak, live + op.inside_bytes)
            live -= freed if op.library else 0
            live -= sum(self.buffers[b].size_bytes for b in dying if b in op.writes)
        return peak


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value, seen through views."""
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _users(user)
        else:
            yield user


def _reduces_columns(node: fx.Node) -> bool:
    """Does a reduction keep the last dimension, and so read memory across its rows?"""
    dims = node.args[1] if len(node.args) > 1 else None
    if _name(node) not in _REDUCTIONS or not isinstance(dims, (list, tuple)):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = _tensors(source)[0].dim()
    return bool(dims) and all(isinstance(d, int) and d % rank != rank - 1 for d in dims)
