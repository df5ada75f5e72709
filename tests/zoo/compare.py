"""Train an entry of the zoo plain and megacompiled, and compare all that can be seen of both."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.loop import Engine, Family, Loop, supervised
from benchmarks.loops.measure import run
from megacompile import megacompile
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ParamRef
from tests import inside
from tests.zoo import equal
from tests.zoo.entry import BATCH, Call, Entry

STEPS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What came out of one entry."""

    name: str
    breaks: int  # calls of captured graphs in a training step, less one
    stages: int  # in the schedules of all these calls
    streamed: float  # the share of the parameters that a schedule streams, 0 to 1
    error: float  # the largest, relative; 0 is equal in every bit
    where: str  # what has this error
    warned: tuple[str, ...]  # by megacompile
    time_s: float  # of the processor


def compare(
    entry: Entry, *, device: str = "cpu", lowering: str = "eager", tiles: int = 1
) -> Result:
    """Two steps with SGD, then a call in eval: losses, outputs, gradients, parameters, buffers.

    Everything that is drawn at random has one seed in both, and Inductor draws as PyTorch does.
    cuDNN computes in float32, by kernels that add in one order. Inductor adds in another one, and
    a batch norm over few elements makes much of that: such models are compared in float64. Those
    for which it draws elsewhere (`Entry.draws`) are compared without dropout.
    """
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with torch._inductor.config.patch(fallback_random=True), exact:
        return _compare(entry, device, lowering, tiles)


def _compare(entry: Entry, device: str, lowering: str, tiles: int) -> Result:
    began = time.process_time()
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = entry.build().train().to(device)
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in plain.modules())
    if normed and lowering == "inductor":
        plain, entry = plain.double(), _in_double(entry)
    if entry.draws and lowering == "inductor":
        _leave_out_dropout(plain)
    worst = Worst()
    ran: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        streamed = megacompile(
            copy.deepcopy(plain), device=device, lowering=lowering, tiles=tiles, progress=False
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, streamed)]
        for i in range(STEPS):
            wanted = _train(plain, entry, i, device)
            last = i == STEPS - 1
            with inside.graph_calls(ran) if last else contextlib.nullcontext():
                worst.compare(f"step {i}", wanted, _train(streamed, entry, i, device))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        programs = {id(program): program for program in ran if program}
        trained = [list(each.executors.values())[-1].schedule for each in programs.values()]
        pair = [_evaluate(model, entry, device) for model in (plain, streamed)]
        worst.compare("eval", *pair)
        pair = [{"parameters": dict(m.named_parameters())} for m in (plain, streamed)]
        worst.compare("end", *pair)
    said = [str(w.message) for w in caught]
    return Result(
        name=entry.name,
        breaks=len(ran) - 1,
        stages=sum(len(s.stages) for s in trained),
        streamed=share_streamed(streamed, trained),
        error=worst.error,
        where=worst.where,
        warned=tuple(dict.fromkeys(s for s in said if s.startswith("megacompile"))),
        time_s=time.process_time() - began,
    )


def share_streamed(model: nn.Module, of: Sequence[Schedule]) -> float:
    """The share of a model's parameters, by their number of elements, that stages read."""
    read = {
        (stage.buckets[ref.bucket].key, ref.param): stage.buckets[ref.bucket].params[ref.param]
        for schedule in of
        for stage in schedule.stages
        for ref in stage.primals
        if isinstance(ref, ParamRef)
    }
    return sum(p.numel for p in read.values()) / sum(p.numel() for p in model.parameters())


class Worst:
    """The largest error so far, and what has it."""

    def __init__(self) -> None:
        self.error = 0.0
        self.where = ""

    def compare(self, what: str, plain: Any, streamed: Any) -> None:
        """Compare two containers of tensors, which must have the same ones."""
        mine, theirs = dict(leaves(plain)), dict(leaves(streamed))
        if mine.keys() != theirs.keys():
            self._take(torch.inf, f"{what}: only one has {sorted(mine.keys() ^ theirs.keys())}")
        # what is 0 but for rounding is measured by the others of its kind
        floors = dict.fromkeys(map(kind, mine), 0.0)
        for name, value in mine.items():
            if value.numel() and value.is_floating_point():
                largest = 1e-3 * float(value.abs().max())
                floors[kind(name)] = max(floors[kind(name)], largest)
        for name in mine.keys() & theirs.keys():
            floor = floors[kind(name)]
            self._take(error(mine[name], theirs[name], floor), f"{what}: {name}")

    def _take(self, found: float, where: str) -> None:
        if found > self.error:
            self.error, self.where = found, where


def kind(name: str) -> str:
    """`grads.layers.0.weight` -> `grads`."""
    return name.partition(".")[0]


def error(plain: Tensor, streamed: Tensor, floor: float = 0.0) -> float:
    """0 where equal in every bit; else relative to the plain one's largest value, or `floor`."""
    plain, streamed = plain.detach().cpu(), streamed.detach().cpu()
    if equal(plain, streamed):
        return 0.0
    if plain.shape != streamed.shape or plain.dtype != streamed.dtype:
        return torch.inf
    if not (plain.is_floating_point() or plain.is_complex()):
        return torch.inf
    scale = max(float(plain.abs().max()), floor, torch.finfo(torch.float32).tiny)
    off = float((plain - streamed).abs().max()) / scale
    return off if off == off else torch.inf


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in an output: containers, data classes, and the caches of transformers."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}.{i}")
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("transformers"):
        yield from leaves(vars(value), name)


_of_tensors = functools.partial(torch.utils._pytree.tree_map_only, Tensor)


def _in_double(entry: Entry) -> Entry:
    """The entry, with inputs for a model in float64."""

    def double(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    return dataclasses.replace(entry, call=lambda: _of_tensors(double, entry.call()))


def _leave_out_dropout(model: nn.Module) -> None:
    """Let nothing be dropped: neither by `nn.Dropout` nor by probabilities that modules keep."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "layerdrop" in name):
                setattr(module, name, 0.0)


def _train(model: nn.Module, entry: Entry, i: int, device: str) -> dict[str, Any]:
    """One forward and backward, and what they left."""
    model.train()
    output = _call(model, entry, i, device)
    loss = loss_of(output)
    loss.backward()
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    seen = {"loss": loss, "output": output, "grads": grads, "buffers": dict(model.named_buffers())}
    return {k: v.detach().clone() for k, v in leaves(seen)}


def _evaluate(model: nn.Module, entry: Entry, device: str) -> Any:
    model.eval()
    with torch.no_grad():
        return {"output": _call(model, entry, STEPS, device)}


def _call(model: nn.Module, entry: Entry, seed: int, device: str) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    call: Any = _of_tensors(lambda tensor: tensor.to(device), entry.call())
    return model(**call)


def loss_of(output: Any) -> Tensor:
    """An output's `loss`, or else the mean squares of all that is differentiable in it."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    parts = [v.square().mean() for _, v in leaves(output) if v.requires_grad]
    return torch.stack(parts).sum()


ROWS, FEWER = 3, 2
SIZES = (  # rows of a batch, and tokens that are added to each text
    *((ROWS, 0), (ROWS, 3), (ROWS, 1), (FEWER, 0)),
    *((ROWS, 4), (FEWER, 2), (ROWS, 3), (FEWER, 5)),
)
SETTLED = 4  # steps
TEXTS = {  # inputs with a token in each column
    *("input_ids", "decoder_input_ids", "labels"),
    *("attention_mask", "token_type_ids", "mm_token_type_ids"),
}
SOUND = "input_values"  # (batch, samples)
SAMPLES = 20  # of sound for a token of a text


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """What was captured of one entry, by step."""

    name: str
    graphs: list[int]  # by Dynamo, for us
    programs: list[int]  # the schedules of these
    theirs: list[int]  # graphs of torch.compile
    equal: bool  # are the losses those of the plain model, but for the entry's `rounding`?
    why: tuple[str, ...]  # of late programs

    @property
    def is_more(self) -> bool:
        """Is more captured than torch.compile captures, in all or late?"""
        late = sum(self.theirs[SETTLED:])
        more = sum(self.graphs) > sum(self.theirs)
        return more or sum(self.programs[SETTLED:]) > late

    def line(self) -> str:
        """For people."""
        numbers = (
            f"{what} {' '.join(map(str, counts))}"
            for what, counts in (
                ("graphs", self.graphs),
                ("programs", self.programs),
                ("torch.compile", self.theirs),
            )
        )
        verdict = ("MORE " if self.is_more else "") + ("" if self.equal else "LOSSES DIFFER")
        return f"{self.name:32} {'  '.join(numbers)}  {verdict}"


def count(entry: Entry) -> Counted:
    """The captures of one entry, on the CPU with eager lowering."""
    batches = supervised(
        lambda size: entry.build(),
        lambda size, k: resized(entry.call(), *SIZES[k]),
        loss_of=lambda model, batch: loss_of(model(**batch)),
    )
    loop = Loop(entry.name, Family.ENCODER, batches)
    plain, theirs, ours = (
        run(loop, engine, size="least", steps=len(SIZES))
        for engine in (Engine.PLAIN, Engine.COMPILE, Engine.OURS)
    )
    tolerance = entry.rounding.tolerance if entry.rounding else 0.0
    losses = zip(sum(plain.losses, []), sum(ours.losses, []), strict=True)
    late = [line for step in ours.steps[SETTLED:] if step.programs for line in step.why]
    return Counted(
        entry.name,
        ours.graphs,
        [step.programs for step in ours.steps],
        theirs.graphs,
        all(abs(a - b) <= tolerance * abs(a) for a, b in losses),
        tuple(dict.fromkeys(line for line in late if "own code" in line)),
    )


def resized(call: Call, rows: int, longer: int) -> Call:
    """The inputs with so many rows, and texts that are so many tokens longer."""
    return {name: _longer(name, _of_rows(value, rows), longer) for name, value in call.items()}


def _of_rows(value: Any, rows: int) -> Any:
    """Of each row of a batch, the tensors may have several rows: an image's patches."""
    if isinstance(value, Mapping):
        return {name: _of_rows(item, rows) for name, item in value.items()}
    if isinstance(value, list):
        return [value[i % len(value)] for i in range(rows)] if len(value) == BATCH else value
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] % BATCH:
        return value
    chosen = torch.arange(rows) % BATCH
    return value.unflatten(0, (BATCH, -1))[chosen].flatten(0, 1)


def _longer(name: str, value: Any, longer: int) -> Any:
    """A text that goes on with its last token, or sound with its last sample."""
    columns = longer if name in TEXTS else longer * SAMPLES if name == SOUND else 0
    if not columns or not isinstance(value, Tensor) or value.dim() != 2:
        return value
    return torch.cat([value, value[:, -1:].expand(-1, columns)], 1)
