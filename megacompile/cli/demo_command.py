"""The command `demo`: trains a small model and prints its schedule and trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import api, inspection
from megacompile.cli.commands import TRACED, print_json
from megacompile.cli.trace_command import write
from megacompile.options import Options

_VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention and a feed-forward layer, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, width), same as the result
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 32)).transpose(1, 3)
        q, k, v = heads.unbind(2)  # each (batch, heads, context, 32)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class GPT(nn.Module):
    """A byte-level language model; returns the loss in nats per byte."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, context + 1) int64
        x = self.token(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def run(args: argparse.Namespace) -> int:
    """Train, trace one step and print the results."""
    device = Options.resolve(device=args.device).device
    context = 128
    torch.manual_seed(0)
    model = api.megacompile(GPT(args.layers, args.width, context), device=device, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = _text()
    say = sys.stderr if args.json else sys.stdout
    size = sum(p.numel() for p in model.parameters())
    print(f"a GPT of {size / 1e6:.2f} M parameters, streamed through {device}", file=say)
    trace = inspection.trace(model)
    losses = []
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - context - 1, (args.batch,))
        tokens = torch.stack([text[i : i + context + 1] for i in starts.tolist()]).long()
        if step == TRACED:
            trace.__enter__()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == TRACED:
            trace.__exit__(None, None, None)
        losses.append(loss.item())
        if step == 1 or step % 10 == 0 or step == args.steps:
            print(f"step {step:4d}   loss {losses[-1]:.4f}", file=say, flush=True)
    schedule = inspection.schedules(model)[0]
    if args.json:
        print_json({"losses": losses, "table": schedule.table(), **trace.to_dict()})
    else:
        code = ("\n\nIts Python:\n\n" + schedule.code()) if args.code else ""
        print(f"\nThe schedule, steps by streams:\n\n{schedule.table()}{code}")
        print(f"\nStep {TRACED}, traced:\n\n{trace.table()}")
    write(trace.measured, trace.predicted, args.save)
    return 0


def _text() -> Tensor:  # (bytes,) uint8
    """The source of this package as training data, which needs no download."""
    root = Path(__file__).resolve().parent.parent
    source = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)
