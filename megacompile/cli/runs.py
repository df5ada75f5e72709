"""The commands that run something here: `demo` and `hardware`."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import api, inspection
from megacompile.cost.rates import load, load_disk
from megacompile.errors import OptionError
from megacompile.options import Options

_TRACED = 3  # the step that `demo` traces, after everything is compiled
_VOCABULARY, _CONTEXT, _WIDTH = 256, 128, 128  # of the demo's model
_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_s": "s"}  # by the end of a rate's name


# --- demo


class GPT(nn.Module):
    """A byte-level language model; returns the loss in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position = nn.Parameter(torch.zeros(_CONTEXT, _WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(_WIDTH, 4, 4 * _WIDTH, 0.0, F.gelu), batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        self.register_buffer("mask", mask)
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, context + 1) int64
        x = self.token(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def demo(args: argparse.Namespace) -> int:
    """Train a small GPT on the source of this package, trace one step and print the results."""
    if args.steps < _TRACED:
        raise OptionError(f"--steps {args.steps}: the traced step is the third; needed 3 or more")
    device = Options.resolve(device=args.device).device
    torch.manual_seed(0)
    model = api.megacompile(GPT(), device=device, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    root = Path(__file__).resolve().parent.parent
    source = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    size = sum(p.numel() for p in model.parameters())
    print(f"a GPT of {size / 1e6:.2f} M parameters, streamed through {device}")
    traced = inspection.trace(model)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - _CONTEXT - 1, (8,))
        tokens = torch.stack([text[i : i + _CONTEXT + 1] for i in starts.tolist()]).long()
        with traced if step == _TRACED else contextlib.nullcontext():
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == args.steps:
            print(f"step {step:4d}   loss {loss.item():.4f}", flush=True)
    schedule = inspection.schedules(model)[0]
    print(f"\nThe schedule, steps by streams:\n\n{schedule.table()}")
    if args.code:
        print(f"\nIts Python:\n\n{schedule.code()}")
    print(f"\nStep {_TRACED}, traced:\n\n{traced.table()}")
    if args.save is not None:
        traced.save(args.save)
    return 0


# --- hardware


def hardware(args: argparse.Namespace) -> int:
    """Measure this machine's rates, or read the cached ones, and print them."""
    device = Options.resolve(device=args.device).device
    found = load(device, again=args.again)
    if args.disk is not None:
        found = load_disk(args.disk, again=args.again).on(found)
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    print(found.name)
    for name, value in asdict(found).items():
        end = next((end for end in _UNITS if name.endswith(end)), None)
        if end is not None and value is not None:
            print(f"  {name.removesuffix(end):15} {value:12.6g} {_UNITS[end]}")
    return 0
