"""A case: a program of parts, as text, and the options that its model is streamed with."""

from __future__ import annotations

import dataclasses
import random
import textwrap
from dataclasses import dataclass
from typing import Any

from tests.frames.parts import KINDS
from tests.frames.views import Part

PROGRAM = '''
"""{title}"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.frames.ops import eagerly, note, untraced

DEVICE = "cpu"

{tops}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
{inits}
        self.head = nn.Linear(4, 2)
{frozen}
    def forward(self, x, k=0, t=None{inputs}):
        x = torch.tanh(self.first(x))
{calls}
        y = torch.tanh(x)
        return self.head(y).square().mean(), y
{methods}

def build():
    torch.manual_seed({seed})
    return Net()


def prepare(model):
    kept = {{}}
{prepares}
    return kept


def make_optimizer(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.{optimizer}


def train(model, kept, see, now):
{setups}
    optimizer = make_optimizer(model)
    for step, rows in enumerate({rows}):
        for micro in range({micro}):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(rows, 4).to(DEVICE)
            t = torch.arange(rows + 1, device=DEVICE) % 3
{aheads}
            loss, y = model(x, step % {indices}, t{given})
            see("loss", loss)
            see("y", y)
{betweens}
            loss.backward()
{behinds}
        for name, p in model.named_parameters():
            see(f"{{name}}.grad", p.grad)
        optimizer.step()
        optimizer.zero_grad()
{steppeds}
    for name, value in model.state_dict().items():
        see(name, value)
{ends}
'''


@dataclass(frozen=True)
class Options:
    """How a model is streamed."""

    dynamic: bool | None = None
    lookahead: int = 2
    resident: str = "auto"  # "0", "some", "all"
    activations: str = "auto"
    device: int = -1  # the seed of an adversarial device; -1: none


@dataclass(frozen=True)
class Case:
    """A program, and how its model is streamed."""

    parts: tuple[tuple[str, int], ...]  # kinds, and their seeds
    rows: tuple[int, ...] = (3, 3, 3)  # of each step
    micro: int = 1  # backwards in a step
    indices: int = 2  # values of the index argument
    frozen: str = ""  # a part, or "first"
    optimizer: str = "SGD(params, lr=0.1, momentum=0.9)"
    options: Options = Options()
    seed: int = 0

    @property
    def rounds(self) -> bool:
        """May a gradient be summed in another order than in the plain program?"""
        return any(part.rounds for part in self.made())

    def made(self) -> list[Part]:
        made = [KINDS[kind](random.Random(seed)) for kind, seed in self.parts]
        return [_named(part, i) for i, part in enumerate(made)]

    def labels(self) -> frozenset[str]:
        """What was drawn, a label for each part."""
        parts = zip(self.parts, self.made(), strict=True)
        return frozenset(
            f"{kind} ({', '.join(filter(None, part.features))})" for (kind, _), part in parts
        )

    def text(self) -> str:
        parts = self.made()

        def lines(name: str, depth: int, wrap: str = "") -> str:
            texts = [textwrap.dedent(getattr(p, name)).strip("\n") for p in parts]
            body = "\n".join(filter(None, texts))
            if body and wrap:
                body = f"{wrap}\n{textwrap.indent(body, ' ' * 4)}"
            return textwrap.indent(body, " " * 4 * depth)

        frozen = f"        self.{self.frozen}.requires_grad_(False)\n" if self.frozen else ""
        between = lines("between", 3, "if now and step == 1:")
        late = lines("between", 3, "if not now and step == 1:")
        text = PROGRAM.format(
            title=f"{', '.join(sorted(self.labels()))}; {self.options}",
            tops="\n\n\n".join(part.top for part in parts),
            inits=lines("init", 2),
            frozen=frozen,
            inputs="".join(f", {part.inputs}=None" for part in parts if part.inputs),
            given="".join(f", {part.inputs}={part.inputs}" for part in parts if part.inputs),
            calls=lines("call", 2),
            methods="\n" + lines("methods", 1) + "\n" if any(p.methods for p in parts) else "",
            seed=self.seed,
            prepares=lines("prepare", 1),
            optimizer=self.optimizer,
            setups=lines("setup", 1),
            rows=self.rows,
            micro=self.micro,
            indices=self.indices,
            aheads=lines("ahead", 3),
            betweens=between,
            behinds="\n".join(filter(None, [late, lines("behind", 3)])),
            steppeds=lines("stepped", 2),
            ends=lines("end", 1),
        )
        return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def _named(part: Part, i: int) -> Part:
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    names: dict[str, Any] = {
        k: v.replace("p0", f"p{i}").replace("P0", f"P{i}") for k, v in texts.items()
    }
    return dataclasses.replace(part, **names)


def draw(rng: random.Random) -> Case:
    kinds = [rng.choice([*KINDS, "helper"]) for _ in range(rng.choice((1, 1, 2, 3)))]
    parts = tuple((kind, rng.randrange(2**20)) for kind in kinds)
    length = rng.choice((3, 3, 4))
    rows = (3,) * length if rng.random() < 0.4 else tuple(rng.randint(2, 6) for _ in range(length))
    sgd, adamw = "SGD(params, lr=0.1, momentum=0.9)", "AdamW(params, lr=0.01, eps=1e-3)"
    options = Options(
        dynamic=rng.choice((None, None, True, False)),
        lookahead=rng.choice((1, 2, 3)),
        resident=rng.choice(("auto", "auto", "some", "all")),
        activations=rng.choice(("auto", "auto", "keep", "recompute", "offload")),
        device=rng.randrange(2**16) if rng.random() < 0.25 else -1,
    )
    return Case(
        parts=parts,
        rows=rows,
        micro=rng.choice((1, 1, 2)),
        indices=rng.choice((2, 3)),
        frozen=rng.choice(("", "", "", "first", "p0")),
        optimizer=rng.choice((sgd, adamw)),
        options=options,
        seed=rng.randrange(2**16),
    )
