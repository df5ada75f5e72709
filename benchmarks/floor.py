"""The least that a training step takes: its matrix products and attention, each measured alone.

    python -m benchmarks.floor --layers 28 --batch 1 --length 262144

Shapes are those of `benchmarks.models.qwen2`, in bf16. Every product of a forward runs once, and
both of its backward (of its input, of its weight); so does causal attention, with its backward. Of
the head the products are computed in chunks of tokens, as its logits would not fit. Nothing is
computed again, nothing is copied, and there is no optimizer: what a step takes beyond this is the
cost of everything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

from benchmarks.models import SHAPE_14B, SHAPE_32B, SHAPE_72B, SHAPE_120B
from benchmarks.report import publish

SHAPES = {
    "7b": {"width": 3584, "intermediate": 18944, "kv_heads": 4},
    "14b": SHAPE_14B,
    "32b": SHAPE_32B,
    "72b": SHAPE_72B,
    "120b": SHAPE_120B,
}
VOCABULARY = 152064
HEAD_DIM = 128
CHUNK = 8192  # tokens of the head


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure and print; gives the table's rows, the last of which is the step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--runs", type=int, default=2, help="of each, behind two that warm up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    width, inner, kv_heads = shape["width"], shape["intermediate"], shape["kv_heads"]
    tokens = args.batch * args.length
    head_tokens = min(tokens, CHUNK)
    kv = kv_heads * HEAD_DIM
    layer = {  # products of a layer: how many, and their `k` and `n`
        "query, output": (2, width, width),
        "key, value": (2, width, kv),
        "gate, up": (2, width, inner),
        "down": (1, inner, width),
    }
    parts = [_Part("attention", args.layers, *_attention(args, width // HEAD_DIM))]
    for name, (count, k, n) in layer.items():
        parts.append(_Part(name, args.layers * count, *_product(tokens, k, n, args)))
    head = _product(head_tokens, width, VOCABULARY, args)
    parts.append(_Part("head, in chunks", tokens / head_tokens, *head))
    rows: list[dict[str, object]] = [part.row() for part in parts]
    rows.append({"of": "a step", "s a step": f"{sum(part.step_s for part in parts):.4f}"})
    what = f"{args.shape}, {args.layers} layers, {args.batch}x{args.length}"
    publish(f"Products and attention of a step alone: {what}", rows, args.out)
    return rows


@dataclass(frozen=True, slots=True)
class _Part:
    """A kind of work."""

    name: str
    times: float  # that a step does it
    forward_s: float
    backward_s: float

    @property
    def step_s(self) -> float:
        return self.times * (self.forward_s + self.backward_s)

    def row(self) -> dict[str, object]:
        return {
            "of": self.name,
            "times a step": f"{self.times:g}",
            "forward ms": f"{self.forward_s * 1e3:.3f}",
            "backward ms": f"{self.backward_s * 1e3:.3f}",
            "s a step": f"{self.step_s:.4f}",
        }


def _product(rows: int, k: int, n: int, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of `x @ weight.T` for (rows, k) and (n, k), and of both products of its backward."""
    x, weight, grad = (_random(shape, args.device) for shape in ((rows, k), (n, k), (rows, n)))
    forward = _seconds(lambda: functional.linear(x, weight), args)
    of_input = _seconds(lambda: grad @ weight, args)
    of_weight = _seconds(lambda: grad.t() @ x, args)
    return forward, of_input + of_weight


def _attention(args: argparse.Namespace, heads: int) -> tuple[float, float]:
    """One causal layer, with keys and values repeated for their heads as transformers does."""
    shape = (args.batch, heads, args.length, HEAD_DIM)
    query, key, value, grad = (_random(shape, args.device) for _ in range(4))
    for tensor in (query, key, value):
        tensor.requires_grad_()

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch.no_grad():
        forward = _seconds(attend, args)
    result = attend()
    inputs = (query, key, value)
    backward = _seconds(lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True), args)
    return forward, backward


def _random(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _seconds(work: Callable[[], object], args: argparse.Namespace) -> float:
    return float(Timer("work()", globals={"work": work}).timeit(args.runs).mean)


if __name__ == "__main__":
    main()
