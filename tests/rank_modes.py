"""Training with a model that ranks share, and in one process: `train` and `reference`.

A mode is a model, an optimizer and options of `megacompile`. Every rank trains on micro-batches of
its own; the reference accumulates those of all ranks in one process. Both give a `Record`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megacompile import accumulate, megacompile
from megacompile.runtime.model.whole_states import whole_on_host
from tests.rank_nets import Words

STEPS = 10
LR = 0.01
Make = Callable[[nn.Module], Optimizer]
Record = dict[str, Any]  # "losses", "norms", "params", "states"


def adamw(model: nn.Module) -> Optimizer:
    """AdamW over what is trained."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


@dataclass(frozen=True)
class Mode:
    """How a model is trained.

    Attributes:
        net: makes it, always with the same values.
        options: of `megacompile`; `DISK` stands for a folder, `HERE` for what differs from rank to
            rank: 'all' in the first, and 0 in the others.
        optimizer: makes the optimizer.
        in_backward: it is given to `megacompile` as `optimizer=`.
        micro: batches before a step.
        marks: `accumulate()` is around all of them but the last, with a step of its own too.
        dtype: of the parameters.
        changed: is given the reference's model, where that must differ: other dtypes.
        tolerance: of losses, norms, parameters and states, relative.
    """

    net: Callable[[], nn.Module] = Words
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Make = adamw
    in_backward: bool = False
    micro: int = 1
    marks: bool = False
    dtype: torch.dtype = torch.float32
    clip: float | None = 0.5
    tolerance: float = 1e-6
    decay: float | None = None  # of the learning rate, each step


def batch(net: nn.Module, step: int, number: int) -> Tensor:
    """A micro-batch: the `number`-th of a step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    words: Tensor = net.batch(generator)  # type: ignore[operator]
    return words


def make(mode: Mode) -> nn.Module:
    """The model before training."""
    torch.manual_seed(0)
    return mode.net().to(mode.dtype)


def reference(mode: Mode, world: int, steps: int = STEPS, device: str = "cpu") -> Record:
    """Train in one process, with the micro-batches of all ranks."""
    model = make(mode).to(device)
    optimizer = mode.optimizer(model)
    schedule = _scheduler(mode, optimizer)
    record: Record = {"losses": [], "norms": []}
    for step in range(steps):
        total = 0.0
        for number in range(world * mode.micro):
            loss = model(batch(model, step, number).to(device)) / (world * mode.micro)
            loss.backward()
            total += loss.item()
        record["losses"].append(total)
        _step(mode, model, optimizer, record)
        schedule.step()
    return record | contents(model, optimizer)


def train(mode: Mode, mesh: Any, steps: int = STEPS) -> Record:
    """Train in this rank; all ranks of the mesh do."""
    world, rank, device = mesh.size(), dist.get_rank(), mesh.device_type
    model = make(mode)
    optimizer = mode.optimizer(model)
    with tempfile.TemporaryDirectory() as folder:
        stands_for = {DISK: folder, HERE: 0 if rank else "all"}
        options: dict[str, Any] = {
            k: next((there for mark, there in stands_for.items() if v is mark), v)
            for k, v in mode.options.items()
        }
        if mode.in_backward:
            options["optimizer"] = optimizer
        megacompile(model, mesh=mesh, device=device, **options)
        schedule = _scheduler(mode, optimizer)
        record: Record = {"losses": [], "norms": []}
        for step in range(steps):
            total = torch.zeros((), dtype=torch.float64, device=device)
            for number in range(mode.micro):
                x = batch(model, step, rank * mode.micro + number).to(device)
                if (mode.in_backward or mode.marks) and number < mode.micro - 1:
                    with accumulate(model):
                        loss = model(x) / mode.micro
                        loss.backward()
                else:
                    loss = model(x) / mode.micro
                    loss.backward()
                total += loss.detach()
            dist.all_reduce(total)
            record["losses"].append(total.item() / world)
            _step(mode, model, optimizer, record)
            schedule.step()
        apart = HERE in mode.options.values()
        return record | contents(model, optimizer, _wherever if apart else whole)


def _scheduler(mode: Mode, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (mode.decay or 1.0) ** step)


def _step(mode: Mode, model: nn.Module, optimizer: Optimizer, record: Record) -> None:
    if mode.clip is not None and not mode.in_backward:
        params = [p for p in model.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(params, mode.clip)
        record["norms"].append(float(whole(norm)))
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks may share, on the host: a collective then."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def _wherever(tensor: Tensor) -> Tensor:
    """The same of one whose parts may lie on the device in one rank and on the host in another,
    for which `full_tensor()` would wait for good."""
    found: Tensor = whole_on_host(tensor.detach()).cpu()
    return found


def contents(
    model: nn.Module, optimizer: Optimizer, gather: Callable[[Tensor], Tensor] = whole
) -> Record:
    """Parameters and states, whole and plain: a collective."""
    params = {name: gather(p).clone() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    saved = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    states = {
        f"{order[i]}/{key}": gather(value).clone()
        for i, state in saved["state"].items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return {"params": params, "states": states}


def differences(ours: Record, theirs: Record, tolerance: float) -> list[str]:
    """What differs by more than a tolerance, relative to the norm of a tensor."""
    found = []
    for kind in ("losses", "norms"):
        a, b = torch.tensor(ours[kind]), torch.tensor(theirs[kind])
        if a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=0.0):
            found.append(f"{kind}: {ours[kind]} and {theirs[kind]}")
    for kind in ("params", "states"):
        if ours[kind].keys() != theirs[kind].keys():
            found.append(f"{kind}: {sorted(ours[kind].keys() ^ theirs[kind].keys())}")
        for name in ours[kind].keys() & theirs[kind].keys():
            found += _difference(f"{kind} {name}", ours[kind][name], theirs[kind][name], tolerance)
    return found


def _difference(name: str, a: Tensor, b: Tensor, tolerance: float) -> list[str]:
    if a.shape != b.shape:
        return [f"{name}: {tuple(a.shape)} and {tuple(b.shape)}"]
    apart = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
    return [] if apart <= tolerance else [f"{name}: relative {apart:.2g}"]


DISK = object()  # in options: a folder
HERE = object()  # in options: 'all' in the first rank, 0 in the others
