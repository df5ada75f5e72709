"""Random small models and plans, as data that hypothesis can draw, shrink and print.

A `Net` calls its layers in any order, some twice; adds earlier values to later ones; takes one or
two inputs; gives a loss and what else was asked for. A `Choice` is the options and choices that its
schedule is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 6
BATCH = 3
KINDS = ("linear", "block", "batch norm", "dropout", "in place", "gain", "fixed")


@dataclass(frozen=True)
class Net:
    kinds: tuple[str, ...]  # of the layers
    hidden: int  # width inside of the blocks
    calls: tuple[int, ...]  # layers in the order of their calls
    skips: tuple[tuple[int, int], ...] = ()  # (call, earlier call whose value is added to it)
    tied: tuple[tuple[int, int], ...] = ()  # layers that have another one's matrix
    frozen: frozenset[int] = frozenset()  # layers without gradients
    changed: frozenset[int] = frozenset()  # calls whose result is changed in place
    second: int = -1  # the call before which the second input enters; -1: there is none
    input_grad: bool = False  # of the first input
    outputs: tuple[int, ...] = ()  # calls whose values are given beside the loss
    in_loss: bool = False  # do these enter what is differentiated?
    rows: tuple[int, ...] = ()  # of the inputs of one call after the other, again and again
    numbers: bool = False  # is there a float and an int among the inputs, others in each call?
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """What a schedule is built with, beyond the model."""

    lookahead: int = 1
    more_slots: int = 0
    keep: int = -1  # stages whose saved tensors are kept, as bits; -1: the plan's own choice
    optimizer: str = ""  # "": no step; "adamw", "sgd": step() after the backwards
    in_backward: bool = False  # the optimizer's step is made in the backward
    backwards: int = 2  # before a step: the second one accumulates
    state_delay: int = 1  # backwards before one waits for states to leave
    disk: bool = False  # the optimizer's states may lie on a disk
    disk_weights: bool = False  # parameters do too
    offload: bool = False  # what recomputes take waits on the host
    disk_saved: bool = False  # and goes on to the disk
    stored: int = -1  # buckets whose states lie there, as bits; -1: all
    resident: int = 0  # buckets that live on the device: none (0), some (1), all (2)
    rerun: int = 0  # stages that run again for their outputs, as bits
    on_host: int = 0  # stages that are kept in half on the host, as bits
    halves: int = 0  # kept stages that keep half on the device, as bits


class Layer(nn.Module):
    """One of `KINDS`; (rows, WIDTH) -> (rows, WIDTH)."""

    norm: nn.Module
    scale: Tensor
    seen: Tensor

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, bias=kind != "gain")
        if kind == "block":
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, hidden)
            self.down = nn.Linear(hidden, WIDTH, bias=False)
        elif kind == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        elif kind == "gain":
            self.gain = nn.Parameter(torch.ones(WIDTH))
        elif kind == "fixed":
            self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.kind == "block":
            y = x + self.down(F.gelu(self.up(self.norm(y))))
            return y
        if self.kind == "batch norm":
            return F.silu(self.norm(y))
        if self.kind == "dropout":
            return F.dropout(torch.tanh(y), 0.3, self.training)
        if self.kind == "in place":
            return F.relu(y, inplace=True)
        if self.kind == "gain":
            return torch.sin(y) * self.gain
        if self.kind == "fixed":
            self.seen += 1
            return y * self.scale + x
        return torch.tanh(y)


class Model(nn.Module):
    """The module of a `Net`; gives (loss, values that were asked for)."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.layers = nn.ModuleList(Layer(kind, net.hidden) for kind in net.kinds)
        made: Any = self.layers
        for one, other in net.tied:
            made[one].linear.weight = made[other].linear.weight
        for i in net.frozen:
            made[i].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(
        self, x: Tensor, z: Tensor | None = None, scale: float = 1.0, count: int = 1
    ) -> tuple[Tensor, list[Tensor]]:
        values: list[Tensor] = []
        skips = dict(self.net.skips)
        for k, i in enumerate(self.net.calls):
            if z is not None and k == self.net.second:
                x = x + z
            x = self.layers[i](x)
            if k in self.net.changed:
                x = x * 0.5
                x.add_(0.25)
            if k in skips:
                x = x + values[skips[k]]
            if self.net.numbers:
                x = x * scale
            values.append(x)
        loss: Tensor = self.head(x).square().mean()
        if self.net.numbers:
            loss = loss * scale / count
        return loss, [values[k] for k in self.net.outputs]


def build(net: Net) -> Model:
    torch.manual_seed(net.seed)
    return Model(net)


def data(net: Net, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    rows = net.rows[step % len(net.rows)] if net.rows else BATCH
    found = {"x": torch.randn(rows, WIDTH, generator=generator)}
    found["x"].requires_grad_(net.input_grad)
    if net.second >= 0:
        found["z"] = torch.randn(rows, WIDTH, generator=generator)
    return found


def numbers(net: Net, step: int) -> dict[str, float]:
    return {"scale": 0.75 + step / 16, "count": 2 + step} if net.numbers else {}


@st.composite
def nets(draw: st.DrawFn, *, lengths: bool = False, numbers: bool = False) -> Net:
    """Any `Net`; with `lengths` that change, and `numbers` in some."""
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=5)))
    layers = range(len(kinds))
    again = draw(st.lists(st.sampled_from(layers), max_size=2))
    calls = (*layers, *again)
    positions = st.integers(0, len(calls) - 1)
    skips = draw(st.dictionaries(positions, positions, max_size=2))
    pairs = draw(st.lists(st.tuples(st.sampled_from(layers), st.sampled_from(layers)), max_size=1))
    outputs = tuple(draw(st.lists(positions, max_size=2)))
    second = st.sampled_from((-1, -1, *range(len(calls))))
    rows: tuple[int, ...] = ()
    if lengths and draw(st.booleans()):
        rows = tuple(draw(st.lists(st.integers(2, 9), min_size=2, max_size=5)))
    return Net(
        kinds=kinds,
        hidden=draw(st.sampled_from((5, 8, 13))),
        calls=calls,
        skips=tuple((k, j) for k, j in sorted(skips.items()) if j < k),
        tied=tuple((i, j) for i, j in pairs if i != j),
        frozen=frozenset(draw(st.sets(st.sampled_from(layers), max_size=1))),
        changed=frozenset(draw(st.sets(positions, max_size=2))),
        second=draw(second),
        input_grad=draw(st.booleans()),
        outputs=outputs,
        in_loss=bool(outputs) and draw(st.booleans()),
        rows=rows,
        numbers=numbers and draw(st.integers(0, 3)) == 0,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    optimizer = draw(st.sampled_from(("", "", "adamw", "sgd")))
    in_backward = bool(optimizer) and draw(st.booleans())
    disk = draw(st.booleans())
    offload = draw(st.booleans())
    return Choice(
        lookahead=draw(st.integers(1, 4)),
        more_slots=draw(st.integers(0, 2)),
        keep=draw(st.one_of(st.just(-1), st.integers(0, 255))),
        optimizer=optimizer,
        in_backward=in_backward,
        backwards=draw(st.integers(1, 2)),
        state_delay=draw(st.sampled_from((1, 1, 2, 9))),
        rerun=draw(st.sampled_from((0, 0b10101010, 0b1001001, 255))),
        disk=disk,
        disk_weights=disk and draw(st.booleans()),
        offload=offload,
        disk_saved=disk and offload and draw(st.booleans()),
        stored=draw(st.one_of(st.just(-1), st.integers(0, 255))),
        resident=draw(st.sampled_from((0, 0, 1, 2))),
        on_host=draw(st.sampled_from((0, 0, 0b1010101, 0b10101010, 255))),
        halves=draw(st.sampled_from((0, 0, 0b1100110, 255))),
    )
