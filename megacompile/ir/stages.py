"""Stages and the templates that stages of equal code share."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.ir.tensors import Meta, Number, Symbols, TensorMeta, Values


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
    """A tensor that the backward reads from the forward or the recompute."""

    index: int


LoweredFn = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]


class Code(enum.Enum):
    """The runnable parts of a template."""

    FORWARD = "forward"  # primals -> outputs, mutated
    FORWARD_SAVING = "forward_saving"  # primals -> outputs, mutated, saved
    RECOMPUTE = "recompute"  # primals -> saved
    BACKWARD = "backward"  # saved and primals, tangents -> gradients

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


@dataclass(frozen=True, eq=False)
class Template:
    """The traced code shared by all stages with the same graph. Primals are the stage's inputs,
    parameters first. `graphs` are functional ATen graphs; the `lower` pass fills `code` with the
    ones that the schedule needs."""

    index: int
    primals: tuple[Meta, ...]
    outputs: tuple[TensorMeta, ...]
    mutated: tuple[int, ...]  # primals whose new values follow the outputs
    saved: tuple[TensorMeta, ...]
    tangents: tuple[int, ...]  # outputs (then mutated inputs) whose gradient the backward takes
    # primals whose gradient so far the backward takes after the tangents
    partial_gradients: tuple[int, ...]
    backward_inputs: tuple[int | SavedRef, ...]  # primal index or saved tensor, before the tangents
    gradients: tuple[int, ...]  # primals whose gradient the backward returns, in this order
    tangent_metas: tuple[TensorMeta, ...]  # of the tangents, then of the partial gradients
    gradient_metas: tuple[TensorMeta, ...]  # of the gradients
    recompute_primals: tuple[int, ...]  # primals that RECOMPUTE reads
    random: bool  # draws random numbers: a recompute needs the generator's state
    graphs: dict[Code, fx.GraphModule] = field(repr=False)
    code: dict[Code, LoweredFn] = field(default_factory=dict, repr=False)
    joint: fx.GraphModule | None = field(default=None, repr=False)  # forward and backward, unsplit
    symbols: Symbols | None = field(default=None, repr=False)  # of its sizes; None without symbols
    # numbers -> the strides of each tangent; None where they are those of the tangents' metas
    tangent_strides: Callable[..., tuple[tuple[int, ...], ...]] | None = field(
        default=None, repr=False
    )
    traced: Template | None = field(default=None, repr=False)  # with other sizes planned
    saved_fraction: float = 1.0  # the share of saved tensors at the split
    tiles: int = 1  # number of tiles of its tokenwise pieces
    # primals and saved tensors whose memory autograd would keep for the backward
    kept: frozenset[int | SavedRef] = frozenset()

    @property
    def has_backward(self) -> bool:
        return Code.BACKWARD in self.graphs

    @functools.cached_property
    def backward_primals(self) -> tuple[int, ...]:
        """Primals that BACKWARD reads directly, and numbers in its tangents' strides."""
        given = [item for item in self.backward_inputs if isinstance(item, int)]
        return tuple(dict.fromkeys((*given, *(self.numbers if self.tangent_strides else ()))))

    def holds(self, values: Values) -> bool:
        """True if the code is valid for these values of its symbols."""
        if self.symbols is None:
            return True
        return self.symbols.fakes.holds(*(values[symbol] for symbol in self.symbols.planned))

    @functools.cached_property
    def draws(self) -> bool:
        """True if its forward or its backward draws random numbers."""
        joint = self.joint
        return self.random or joint is not None and any(map(compat.is_random, joint.graph.nodes))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Primals that are numbers."""
        return tuple(i for i, meta in enumerate(self.primals) if isinstance(meta, Number))


@dataclass(frozen=True, eq=False)
class Stage:
    """A contiguous, stateless part of the captured graph; usually one layer."""

    index: int
    name: str  # the module path of the unit it covers
    module: fx.GraphModule = field(repr=False)  # torch-level; inputs are the primals, in order
    buckets: tuple[Bucket, ...]
    primals: tuple[Primal, ...]
    metas: tuple[Meta, ...]  # of the primals
    outputs: tuple[TensorMeta, ...]  # of the outputs, without the mutated inputs' new values
    mutated: tuple[int, ...]  # primals that the stage changes in place
    template: Template | None = None
    # in a draft: positions of its saved tensors, grouped by value; (): each is one value
    bundles: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        return f"stage_{self.index}"

    @functools.cached_property
    def traced(self) -> Template:
        """The template; an internal error if the `templates` pass has not run."""
        assert self.template is not None, f"stage {self.index} ({self.name}) has no template yet"
        return self.template

    @functools.cached_property
    def result_count(self) -> int:
        """Its outputs, then the new values of its mutated inputs."""
        return len(self.outputs) + len(self.mutated)

    @property
    def saved_values(self) -> tuple[TensorMeta | tuple[TensorMeta, ...], ...]:
        """Metas of the values that its forward saves for its backward; a tuple of metas for a
        bundle."""
        saved = self.traced.saved
        if not self.bundles:
            return saved
        return tuple(
            saved[bundle[0]] if len(bundle) == 1 else tuple(saved[i] for i in bundle)
            for bundle in self.bundles
        )

    @functools.cached_property
    def gradient_buckets(self) -> tuple[Bucket, ...]:
        """The buckets with gradients from the stage's backward, one group each."""
        return self.buckets_read(self.traced.gradients)

    @functools.cached_property
    def buckets_of(self) -> dict[Code, tuple[Bucket, ...]]:
        """The buckets that its forward, its recompute and its backward read."""
        return {
            Code.FORWARD: self.buckets_read(range(len(self.primals))),
            Code.RECOMPUTE: self.buckets_read(self.traced.recompute_primals),
            Code.BACKWARD: self.buckets_read(self.traced.backward_primals),
        }

    @functools.cached_property
    def gradient_params(self) -> tuple[tuple[int, int], ...]:
        """The parameters that get a gradient: bucket key and index."""
        return tuple(place for place in self.gradient_places if place is not None)

    @functools.cached_property
    def gradient_places(self) -> tuple[tuple[int, int] | None, ...]:
        """The places of its backward's gradients: (bucket key, parameter), or None for another
        primal."""
        refs = [self.primals[i] for i in self.traced.gradients]
        return tuple(
            (self.buckets[ref.bucket].key, ref.param) if isinstance(ref, ParamRef) else None
            for ref in refs
        )

    @functools.cached_property
    def partial_args(self) -> int:
        """The number of partial gradients that are of args; they come before those of buckets."""
        return len(self.arg_refs(self.traced.partial_gradients))

    def arg_refs(self, primals: Sequence[int]) -> list[ArgRef]:
        """The `primals` that are not parameters."""
        return [ref for ref in (self.primals[i] for i in primals) if isinstance(ref, ArgRef)]

    def buckets_read(self, primals: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets of the parameters in `primals`."""
        refs = [self.primals[i] for i in primals]
        used = {ref.bucket for ref in refs if isinstance(ref, ParamRef)}
        return tuple(self.buckets[i] for i in sorted(used))
