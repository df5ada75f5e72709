"""The words of the design as frozen data: Bucket, Slot, Template, Stage, Plan, Schedule.

Nothing here computes on a device. A `Schedule` holds two FX graphs (forward and, where gradients
are needed, backward) whose every node is a `call_function` of an op in `megacompile.ops`. Passes
take a schedule and return another one; `Schedule.history` keeps what each of them did.

Sizes are in bytes. Names are those that are printed everywhere: a stage is its index in execution
order, a bucket carries the index of the first stage that reads it.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

ALIGNMENT_BYTES = 256  # of each parameter in its bucket, as the CUDA allocator gives


class Stream(enum.Enum):
    """The in-order queues a schedule's ops run on."""

    COMPUTE = "compute"  # the user's current stream: every forward, recompute and backward
    H2D = "h2d"  # host to device: weights, activations, gradients that are accumulated into
    D2H = "d2h"  # device to host: gradients, and activations until their backward


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a tensor looks like, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool = False
    device: torch.device = torch.device("cpu")

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """The meta of a dense tensor."""
        return TensorMeta(
            tuple(int(n) for n in tensor.shape),
            tensor.dtype,
            tuple(int(n) for n in tensor.stride()),
            tensor.requires_grad and not _cut_off(tensor),
            tensor.device,
        )

    def empty(self) -> torch.Tensor:
        """A new tensor like this (a fake one under a fake mode)."""
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )

    def zeros(self) -> torch.Tensor:
        """A new tensor of zeros like this."""
        with torch.no_grad():
            return self.empty().zero_()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements (not of the storage it may be a view of)."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


def _cut_off(tensor: torch.Tensor) -> bool:
    """Was it made as a view under `no_grad`? It says `requires_grad`, but no gradient flows."""
    base = tensor._base
    return base is not None and base.requires_grad and tensor.grad_fn is None


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter's place in its bucket."""

    name: str  # fully qualified, as in named_parameters()
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The parameters of a unit of the module tree as one flat host buffer.

    `key` identifies the buffer; `label` is what is printed: the index of the first stage that
    reads it in this schedule, with ".1", ".2" where that stage reads more than one.
    """

    key: int
    name: str  # the unit's module path, e.g. "layers.3"
    params: tuple[Param, ...]
    size_bytes: int
    label: str = "?"

    @staticmethod
    def layout(key: int, name: str, params: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
        """Place `params` one after the other, each aligned to `ALIGNMENT_BYTES`.

        Dense, non-overlapping strides (such as channels_last) are kept; others become contiguous.
        """
        placed = []
        offset = 0
        for param_name, tensor in params:
            stride = torch.empty_like(tensor, device="meta").stride()  # preserve_format
            param = Param(param_name, tuple(tensor.shape), tuple(stride), tensor.dtype, offset)
            placed.append(param)
            offset += -(-param.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return Bucket(key, name, tuple(placed), offset)

    def __repr__(self) -> str:
        return f"bucket_{self.label.replace('.', '_')}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A device buffer that buckets are streamed into."""

    index: int
    size_bytes: int

    def __repr__(self) -> str:
        return f"slot_{self.index}"


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A stage input that is a parameter: `stage.buckets[bucket].params[param]`."""

    bucket: int
    param: int


@dataclass(frozen=True, slots=True)
class ArgRef:
    """A stage input that is an activation, a buffer or an input of the model."""

    index: int


Primal = ParamRef | ArgRef


@dataclass(frozen=True, slots=True)
class SavedRef:
    """A tensor that the backward takes from the forward or the recompute."""

    index: int


LoweredFn = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A captured graph's input that is a streamed parameter."""

    bucket: Bucket
    param: int  # index into bucket.params
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A captured graph's input that is a tensor: data, an activation, a buffer, a constant."""

    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """A captured graph's input that is a Python number: a dynamic size, a flag."""

    value: int | float | bool


GraphInput = ParamInput | TensorInput | ConstantInput


@dataclass(frozen=True, slots=True)
class Unit:
    """A subtree of the module tree that is streamed as one bucket."""

    bucket: Bucket
    modules: frozenset[int]  # id() of the modules of the subtree
    roots: frozenset[int]  # those of them that contain the others: a call of one is a stage
    repeated: bool  # a child of a container of like modules: stages of it share a template


@dataclass(frozen=True, slots=True)
class Ambient:
    """The thread's state in which a graph was captured, and must be traced."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # (device type, enabled, dtype)
    default_dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Ambient:
        """The state of this thread, as far as it concerns work on `device`."""
        kinds = sorted({"cpu", device.type})
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        return Ambient(torch.is_grad_enabled(), autocast, torch.get_default_dtype())

    @contextlib.contextmanager
    def apply(self, *, autocast: bool = True) -> Iterator[None]:
        """Put this thread into that state (with `autocast=False`: autocast off)."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, enabled, dtype in self.autocast:
                on = enabled and autocast
                stack.enter_context(
                    torch.autocast(kind, dtype if on else None, enabled=on, cache_enabled=False)
                )
            yield


@dataclass(frozen=True, slots=True)
class Overlap:
    """Inputs of a captured graph that share memory, as views of one base of `numel` elements."""

    members: tuple[tuple[int, int], ...]  # (position among the inputs, offset in the base)
    numel: int
    hindrance: str = ""  # why they cannot be views of one base


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured torch-level graph with one kind of input bound to each placeholder."""

    name: str
    module: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...]
    device: torch.device
    ambient: Ambient
    overlaps: tuple[Overlap, ...] = ()  # between inputs of which the graph changes one in place


@dataclass(frozen=True, slots=True)
class Variant:
    """What one schedule of a captured graph is built for."""

    tangents: tuple[int, ...]  # the outputs that get a gradient
    keep_last: bool  # False: saved tensors are computed again; the forward's are for other outputs
    accumulate: bool = False  # add to gradients that are on the host already
    hold: bool = False  # the backward takes what the forward left in the slots
    update: bool = False  # the optimizer's, in the backward


class Code(enum.Enum):
    """The pieces of a template that can run."""

    FORWARD = "forward"  # primals -> outputs, mutated
    FORWARD_SAVING = "forward_saving"  # primals -> outputs, mutated, saved
    RECOMPUTE = "recompute"  # primals -> saved
    BACKWARD = "backward"  # saved and primals, tangents -> gradients


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The traced code of every stage that has the same graph.

    Primals are the stage's inputs, parameters first. `graphs` are functional ATen graphs; `code`
    is filled by the `lower` pass with what the schedule needs of them.
    """

    index: int
    primals: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    mutated: tuple[int, ...]  # primals whose new value follows the outputs
    saved: tuple[TensorMeta, ...]
    tangents: tuple[int, ...]  # outputs (mutated ones after them) whose gradient the backward takes
    carries: tuple[int, ...]  # primals whose gradient so far the backward takes after the tangents
    backward_inputs: tuple[int | SavedRef, ...]  # primal index or saved tensor, before the tangents
    gradients: tuple[int, ...]  # primals whose gradient the backward returns, in this order
    tangent_metas: tuple[TensorMeta, ...]  # of the tangents, then of the carries
    gradient_metas: tuple[TensorMeta, ...]  # of the gradients
    recompute_primals: tuple[int, ...]  # primals that RECOMPUTE reads
    random: bool  # draws random numbers: a recompute needs the generator's state
    graphs: dict[Code, fx.GraphModule] = field(repr=False)
    code: dict[Code, LoweredFn] = field(default_factory=dict, repr=False)
    joint: fx.GraphModule | None = field(default=None, repr=False)  # forward and backward, unsplit
    budget: float = 1.0  # the share of the saved tensors that it was split for

    @property
    def has_backward(self) -> bool:
        return Code.BACKWARD in self.graphs

    @property
    def backward_primals(self) -> tuple[int, ...]:
        """Primals that BACKWARD reads directly."""
        return tuple(item for item in self.backward_inputs if isinstance(item, int))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved tensors of one call."""
        return sum(meta.size_bytes for meta in self.saved)


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """A contiguous, stateless piece of the captured graph; usually one layer."""

    index: int
    name: str  # the module path of the unit it covers
    module: fx.GraphModule = field(repr=False)  # torch-level; inputs are the primals, in order
    buckets: tuple[Bucket, ...]
    primals: tuple[Primal, ...]
    metas: tuple[TensorMeta, ...]  # of the primals
    outputs: tuple[TensorMeta, ...]  # of the outputs, before the mutated inputs' new values
    mutated: tuple[int, ...]  # primals that the stage changes in place
    template: Template | None = None

    def __repr__(self) -> str:
        return f"stage_{self.index}"

    @property
    def traced(self) -> Template:
        """The template; an error of ours where the `templates` pass has not run."""
        assert self.template is not None, f"stage {self.index} ({self.name}) has no template yet"
        return self.template

    @property
    def gradient_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that the stage's backward gives gradients for, a group each."""
        return self.buckets_read(self.traced.gradients)

    def buckets_read(self, primals: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets that hold the parameters among `primals`."""
        refs = [self.primals[i] for i in primals]
        used = {ref.bucket for ref in refs if isinstance(ref, ParamRef)}
        return tuple(self.buckets[i] for i in sorted(used))


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions a schedule is built from."""

    keep: frozenset[int] = frozenset()  # stages whose saved tensors are kept, not recomputed
    reasons: tuple[str, ...] = ()
    resident: frozenset[int] = frozenset()  # buckets (keys) that live on the device
    hand_over: frozenset[int] = frozenset()  # buckets (keys) that step() updates on the device
    offload: frozenset[int] = frozenset()  # stages whose residuals wait on the host
    budgets: tuple[tuple[int, float], ...] = ()  # (kept stage, share of its saved tensors, 0 to 1)
    state_delay: int = 1  # backwards that are issued before one waits for states to leave


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One entry of a schedule's history."""

    name: str
    before: str  # the schedule's actions, one graph a line
    after: str
    time_s: float
    nodes: int  # in both graphs, afterwards


@dataclass(frozen=True, eq=False)
class Schedule:
    """The scheduled graphs of one captured graph, for one set of input shapes.

    `print(schedule)` is the Python that the executor runs. A forward returns its outputs and the
    residuals: the values that the backward's placeholders of the same names stand for, and more
    that a backward for other outputs would take.
    """

    name: str
    forward: fx.Graph
    backward: fx.Graph | None
    stages: tuple[Stage, ...]
    residuals: tuple[str, ...] = ()  # names of the forward's nodes that a backward may take
    tangents: tuple[int, ...] = ()  # the forward's outputs whose gradient the backward takes
    gradients: tuple[str, ...] = ()  # forward placeholders whose gradient the backward returns
    plan: Plan = Plan()
    slots: tuple[Slot, ...] = ()
    held: tuple[tuple[int, Bucket], ...] = ()  # (slot, bucket) that the forward leaves in place
    history: tuple[PassRecord, ...] = ()
    draft: bool = False  # only to be simulated: passes change its graphs in place

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """The graphs that there are, by name."""
        both = {"forward": self.forward, "backward": self.backward}
        return {name: graph for name, graph in both.items() if graph is not None}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a stage reads, in the order of first use."""
        return tuple({b.key: b for stage in self.stages for b in stage.buckets}.values())

    @property
    def gradient_params(self) -> dict[int, tuple[int, ...]]:
        """The parameters that get a gradient: bucket key -> indices into its params."""
        found: dict[int, set[int]] = {}
        for stage in self.stages:
            for ref in (stage.primals[i] for i in stage.traced.gradients):
                if isinstance(ref, ParamRef):
                    found.setdefault(stage.buckets[ref.bucket].key, set()).add(ref.param)
        return {key: tuple(sorted(params)) for key, params in found.items()}

    @property
    def templates(self) -> tuple[Template, ...]:
        """The distinct templates, in the order of first use."""
        return tuple(dict.fromkeys(stage.traced for stage in self.stages))

    def copy(self) -> Schedule:
        """The same schedule with graphs of its own for a pass to change; a draft gives itself."""
        if self.draft:
            return self
        return replace(
            self,
            forward=copy_graph(self.forward),
            backward=None if self.backward is None else copy_graph(self.backward),
        )

    def code(self) -> str:
        """The Python source that the executor runs, with comments."""
        from megacompile import show

        return show.code(self)

    def table(self) -> str:
        """Steps down, streams across."""
        from megacompile import show

        return show.table(self)

    def diff(self, other: Schedule, *, code: bool = False) -> str:
        """What `other` does differently: what it was made with, then a unified diff by stage.

        With `code`, the Python is compared instead of the actions. "" where they do the same.
        """
        from megacompile import changes

        return changes.diff(self, other, code=code)

    def passes(self) -> str:
        """The history as a table: each pass, its time, the nodes before and after it."""
        from megacompile import changes

        return changes.passes(self)

    def to_networkx(self) -> Any:
        """A `networkx.MultiDiGraph`: ops as nodes, with `kind` on the edges that order them."""
        from megacompile import export

        return export.to_networkx(self)

    def to_dot(self) -> str:
        """The same in the DOT language, a cluster for each stream."""
        from megacompile import export

        return export.to_dot(self)

    def __str__(self) -> str:
        return self.code()


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with nodes of its own and the same names."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = copied.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, lambda n: nodes[n]),
            fx.map_arg(node.kwargs, lambda n: nodes[n]),
            node.name,
        )
        assert new.name == node.name, f"{node.name} was renamed {new.name} in a copy"
        new.meta = dict(node.meta)
        nodes[node] = new
    return copied


def short_dtype(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, as FX prints it."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def printable(text: str) -> str:
    """Text of which no part leaves its line: escapes for newlines and what else is not printed."""
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


def format_bytes(size_bytes: float) -> str:
    """ "1.09 GiB": three significant digits, binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:  # what rounds to 1000 has a unit of its own
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def tensors_bytes(value: Any) -> int:
    """Bytes of a TensorMeta or of a nested tuple of them (None counts nothing)."""
    if isinstance(value, TensorMeta):
        return value.size_bytes
    if isinstance(value, tuple):
        return sum(tensors_bytes(item) for item in value)
    return 0
