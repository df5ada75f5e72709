"""Divide a module tree into units: the subtrees whose parameters are streamed as one bucket.

    Transformer(embed, layers=[L, L, L], norm, head)   ->   embed | L | L | L | norm + head

A unit is a child of the outermost repeated container (`ModuleList`, `Sequential` or `ModuleDict`
with two or more children of one class), or the largest subtree under `UNIT_LIMIT_BYTES` where
nothing repeats. Adjacent non-layers share a bucket if one of them is tiny. A tied parameter belongs
to the first unit that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megacompile.ir.buckets import Bucket, Unit
from megacompile.packed import Leaf, leaves, own_leaves

UNIT_LIMIT_BYTES = 4 * 2**30
_TINY = 16  # a unit this many times smaller than its neighbor joins the neighbor's bucket
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class _Subtree:
    name: str
    roots: tuple[nn.Module, ...]
    params: tuple[Leaf, ...]
    repeated: bool

    @property
    def size_bytes(self) -> int:
        return sum(leaf.tensor.numel() * leaf.tensor.dtype.itemsize for leaf in self.params)


def find_units(
    model: nn.Module,
    *,
    limit_bytes: int = UNIT_LIMIT_BYTES,
    compute_dtype: torch.dtype | None = None,
    ranks: int = 1,
    replicas: int = 1,
) -> tuple[Unit, ...]:
    """The units of `model`, in the order of its module tree; together they hold every parameter.

    With `compute_dtype`, buckets hold float32 parameters in that dtype, except packed ones. With
    `ranks`, each rank has a part of every bucket; `replicas` ranks have the same part.
    """
    seen: set[int] = set()
    subtrees = []
    for subtree in _split(model, "", limit_bytes, repeated=False):
        fresh = [leaf for leaf in subtree.params if id(leaf.tensor) not in seen]
        fresh = list({id(leaf.tensor): leaf for leaf in reversed(fresh)}.values())[::-1]
        seen.update(id(leaf.tensor) for leaf in fresh)
        subtrees.append(_Subtree(subtree.name, subtree.roots, tuple(fresh), subtree.repeated))
    return tuple(
        Unit(
            bucket=_bucket(key, subtree, compute_dtype, ranks, replicas),
            modules=frozenset(id(m) for root in subtree.roots for m in root.modules()),
            roots=frozenset(map(id, subtree.roots)),
            repeated=subtree.repeated,
        )
        for key, subtree in enumerate(_join_small([s for s in subtrees if s.params]))
    )


def _bucket(
    key: int, subtree: _Subtree, compute_dtype: torch.dtype | None, ranks: int, replicas: int
) -> Bucket:
    packed = {leaf.name for leaf in subtree.params if leaf.packed}
    params = [
        (name, tensor)
        if compute_dtype is None or part or tensor.dtype != torch.float32
        else (name, torch.empty(tensor.shape, dtype=compute_dtype, device="meta"))
        if ranks > 1
        else (name, torch.empty_like(tensor, dtype=compute_dtype, device="meta"))
        for name, tensor, part in subtree.params
    ]
    return Bucket.layout(key, subtree.name, params, packed, ranks, replicas)


def _split(module: nn.Module, name: str, limit_bytes: int, *, repeated: bool) -> Iterator[_Subtree]:
    label = name or type(module).__name__
    whole = _Subtree(label, (module,), tuple(leaves(module, name)), repeated)
    if not whole.params:
        return
    divides = not repeated and any(map(_repeated_classes, module.modules()))
    children = list(module.named_children())  # none: one module over the limit stays whole
    if not children or (whole.size_bytes <= limit_bytes and not divides):
        yield whole
        return
    prefix = f"{name}." if name else ""
    own = tuple(own_leaves(module, prefix))
    if own:
        yield _Subtree(label, (), own, repeated=False)
    like = _repeated_classes(module)
    for child_name, child in children:
        yield from _split(child, prefix + child_name, limit_bytes, repeated=type(child) in like)


def _repeated_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Classes with at least two children, with parameters, in a container."""
    if not isinstance(module, _CONTAINERS):
        return set()
    counts = Counter(
        type(child) for child in module.children() if next(child.parameters(), None) is not None
    )
    return {cls for cls, count in counts.items() if count >= 2}


def _join_small(subtrees: Sequence[_Subtree]) -> list[_Subtree]:
    """Join adjacent non-layers into one bucket if one of them is tiny."""
    joined: list[_Subtree] = []
    for subtree in subtrees:
        if joined and not subtree.repeated and not joined[-1].repeated:
            last = joined[-1]
            small, large = sorted((last.size_bytes, subtree.size_bytes))
            if small * _TINY <= large:
                joined[-1] = _Subtree(
                    f"{last.name}+{subtree.name}",
                    last.roots + subtree.roots,
                    last.params + subtree.params,
                    repeated=False,
                )
                continue
        joined.append(subtree)
    return joined
