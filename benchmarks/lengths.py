"""Training on batches of many lengths: seconds and compilations, beside the plain model.

    python -m benchmarks.lengths --steps 40 --lengths 25            eager, tiny
    python -m benchmarks.lengths --lowering inductor --plain compile

The plain loop is eager code, or `torch.compile` with `--plain compile`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.passes.stages import lower

VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = heads.transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        x = x + self.mlp(self.norm2(x))
        return x


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        loss: Tensor = F.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        return loss


def measured(model: Any, batches: list[Tensor]) -> tuple[list[float], list[float]]:
    """Losses, and seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lengths", type=int, default=25)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--plain", choices=("eager", "compile"), default="eager")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rng = random.Random(0)
    lengths = rng.sample(range(8, args.longest), args.lengths)
    drawn = [*lengths, *rng.choices(lengths, k=max(0, args.steps - len(lengths)))][: args.steps]
    torch.manual_seed(0)
    batches = [torch.randint(VOCABULARY, (args.rows, n), device=args.device) for n in drawn]

    torch.manual_seed(1)
    plain: Any = Model(args.width, args.layers).to(args.device)
    step = torch.compile(plain) if args.plain == "compile" else plain
    losses, seconds = measured(step, batches)
    print(f"plain, {args.plain}: {sum(seconds):.2f} s, the last {seconds[-1]:.4f} s")
    torch._dynamo.reset()

    torch.manual_seed(1)
    streamed: Any = megacompile(
        Model(args.width, args.layers), device=args.device, lowering=args.lowering, progress=False
    )
    compiled: list[object] = []
    make = lower._lower
    lower._lower = lambda *given: compiled.append(given) or make(*given)  # type: ignore[func-returns-value]
    theirs, seconds = measured(streamed, batches)
    graphs = streamed._compiled_call_impl.graphs
    worst = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
    print(
        f"megacompile, {args.lowering}: {sum(seconds):.2f} s, the last {seconds[-1]:.4f} s; "
        f"{len(graphs)} graphs captured, {sum(len(g.programs) for g in graphs)} programs, "
        f"{len(compiled)} stage graphs lowered; largest difference of a loss {worst:.1e}"
    )
    late = [f"{k}: {s:.2f}" for k, s in enumerate(seconds) if s > 0.2]
    print(f"steps above 0.2 s: {', '.join(late)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
