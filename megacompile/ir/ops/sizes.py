"""Bytes that ops move: what the cost of an op is declared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from megacompile.ir.tensors import tensors_bytes

Size = Callable[[fx.Node], int]


def value_bytes(node: Any) -> int:
    """Bytes of what a node returns; 0 for no node, and for what has no size."""
    return tensors_bytes(node.meta.get("value")) if isinstance(node, fx.Node) else 0


def of_value(times: int = 1) -> Size:
    """Those of what the op returns, as often."""
    return lambda node: times * value_bytes(node)


def of_argument(at: int, times: int = 1) -> Size:
    """Those of an argument, as often."""
    return lambda node: times * value_bytes(node.args[at])


def of_arguments(node: fx.Node) -> int:
    """Those of all arguments together."""
    taken: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: taken.setdefault(n))
    return sum(map(value_bytes, taken))


def of_bucket(node: fx.Node) -> int:
    """Those of the op's bucket."""
    bucket: Any = node.args[0]
    return int(bucket.size_bytes)


def of_shard(node: fx.Node) -> int:
    """Those of one rank's part of the op's bucket."""
    bucket: Any = node.args[0]
    return int(bucket.shard_bytes)


def tensors_of_arguments(node: fx.Node) -> int:
    """Number of tensors of the largest group among the arguments."""
    values = [source.meta.get("value") for source in node.all_input_nodes]
    return max([len(value) for value in values if isinstance(value, tuple)], default=1)


def of_params(times: int = 1) -> Size:
    """Number of parameters of the op's bucket, times a factor."""

    def count(node: fx.Node) -> int:
        bucket: Any = node.args[0]
        return times * len(bucket.params)

    return count
