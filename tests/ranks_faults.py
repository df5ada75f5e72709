"""Ranks of which one does something else: `python -m tests.ranks_faults FOLDER CASE...`.

Each case is a few processes that train together, forked from this one, so that torch is imported
once; they end as other processes do. What each rank raised and when it ended is saved into
`FOLDER/CASE.json`. Without a case all are run.

`--device cuda` runs them with NCCL: two new processes each, on two GPUs of those that there are. It
prints what each rank did, for people to read. A case of four needs as many GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import megacompile as package
import megacompile.runtime.checkpoint.save as saving
from megacompile import megacompile
from megacompile.cost import ranks as cost_ranks
from megacompile.runtime.device import rank_faults, ranks
from megacompile.runtime.device.ranks import Ranks, whole
from megacompile.runtime.model.whole_states import Saving
from megacompile.tracing import perfetto, rank_steps

MOST_S = 120.0  # a rank that has not ended by then is killed
AT_ONCE = 4  # cases: most of their time they wait, on the same GPUs too
AGES = 1000.0  # seconds that nobody waits


class Net(nn.Module):
    def __init__(self, depth: int = 3, hook: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.hook = hook  # called in the middle of a backward

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


class Loop:
    """A training loop of one rank, to be spoilt."""

    def __init__(self, rank: int, world: int, kind: str) -> None:
        self.rank, self.world = rank, world
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        self.mesh = init_device_mesh(kind, (world,))
        torch.manual_seed(0)
        self.model = self.megacompile(Net(), resident=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def megacompile(self, model: nn.Module, **options: Any) -> Any:
        options = {"mesh": self.mesh, "device": self.device, "lowering": "eager", **options}
        return megacompile(model, **options)

    def loss(self, rows: int = 2) -> Tensor:
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(self.rank))
        loss: Tensor = self.model(x.to(self.device))
        return loss

    def update(self, *, clip: bool = True) -> None:
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, micro_batches: int = 1, *, clip: bool = True) -> None:
        for _ in range(count):
            for _ in range(micro_batches):
                self.loss().backward()
            self.update(clip=clip)


# The cases. The last rank is the one that does something else.


def raises_between(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        raise ValueError("bad batch")
    loop.steps(2)


def raises_in_a_graph(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    if odd:

        def fail(*_: Any) -> None:
            raise ValueError("bad stage")

        Ranks.gather = fail  # type: ignore[assignment, method-assign]
    loop.steps(2)


def skips_a_step(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    loop.loss().backward()
    if not odd:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.steps(1)


def raises_in_a_backward(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    if odd:
        machine: Any = loop.model

        def fail(module: nn.Module, given: Any, result: Any) -> None:
            raise ValueError("bad hook")

        machine.layers[1].register_full_backward_hook(fail)
    loop.steps(2)


def is_killed(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    loop.steps(2)


def rank_0_is_killed(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if loop.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    loop.steps(2)


def is_killed_in_a_save(loop: Loop, odd: bool) -> None:
    """The first one writes, and takes nothing for whole."""
    with tempfile.TemporaryDirectory() as folder:
        package.save(loop.model, Path(folder) / "whole")

        def killed(like: Tensor, part: Tensor) -> Tensor:
            if odd and like.shape == (8,):
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(like, part)

        try:
            with mock.patch.object(ranks, "whole", killed):
                package.save(loop.model, Path(folder) / "part")
        finally:
            left = [path.name for path in Path(folder).glob("part/*")]
            assert not left, left


def saves_for_long(loop: Loop, odd: bool) -> None:
    """No fault: the disk takes longer than the patience of ranks that wait for it."""
    stock = saving._sync

    def slow(path: Path) -> None:
        if path.name.endswith(".safetensors.incomplete"):
            time.sleep(12)
        stock(path)

    saving._sync = slow
    with tempfile.TemporaryDirectory() as folder:
        package.save(loop.model, folder)


def saves_alone(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    if odd:
        with tempfile.TemporaryDirectory() as folder:
            package.save(loop.model, folder)
    loop.steps(1)


def saves_state_dicts_alone(loop: Loop, odd: bool) -> None:
    """As `trainer.save_model()` in one rank."""
    loop.steps(1)
    if odd:
        with Saving([loop.model], [loop.optimizer], writes=True):
            pass
    loop.steps(1)


def is_stopped(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    loop.steps(2)


def is_idle(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        time.sleep(AGES)
    loop.steps(2)


def works_for_long(loop: Loop, odd: bool) -> None:
    """No fault: it takes longer than the patience of the others, and comes."""
    loop.steps(2)
    began_s = time.monotonic()
    while odd and time.monotonic() - began_s < 12:
        pass
    loop.steps(2)


def ends_early(loop: Loop, odd: bool) -> None:
    loop.steps(2 if odd else 3)


def exits(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        sys.exit(3)
    loop.steps(1)


def other_micro_batches(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    loop.steps(2, micro_batches=1 if odd else 2, clip=False)


def accumulates_alone(loop: Loop, odd: bool) -> None:
    """One of two replicas says that another micro-batch comes."""
    mesh = init_device_mesh(loop.device.type, (2, loop.world // 2))
    model = loop.megacompile(Net(), mesh=mesh)
    x = torch.ones(2, 8, device=loop.device)
    with package.accumulate(model):
        model(x).backward()
    with package.accumulate(model) if odd else nullcontext():
        model(x).backward()


def evaluates(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    if odd:
        with torch.no_grad():
            loop.loss()
    loop.steps(1)


def does_not_clip(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    loop.loss().backward()
    if odd:
        loop.optimizer.step()
    else:
        loop.update()
    loop.steps(1)


def other_shapes(loop: Loop, odd: bool) -> None:
    """No fault where the collectives are the same."""
    for step in range(3):
        loop.loss(rows=3 if odd and step else 2).backward()
        loop.update()


def other_model(loop: Loop, odd: bool) -> None:
    if odd:
        loop.model.layers[1].requires_grad_(False)
    loop.steps(1)


class Gate(nn.Module):
    """Two parameters of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.gate(x)) * self.up(x)
        return result


class Gated(nn.Module):
    """Layers of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def freezes_another(loop: Loop, odd: bool) -> None:
    """As many bytes of gradients, of other parameters."""
    model = loop.megacompile(Gated())
    model.get_submodule("layers.1.gate" if odd else "layers.1.up").requires_grad_(False)
    model(torch.ones(2, 8, device=loop.device)).backward()


def is_interrupted(loop: Loop, odd: bool) -> None:
    """The other ranks wait for this one, which gets Ctrl-C; and so do they."""
    loop.steps(2)
    if odd:
        time.sleep(3)
        signal.raise_signal(signal.SIGINT)
    loop.steps(2)


def all_are_interrupted(loop: Loop, odd: bool) -> None:
    """Those that wait get Ctrl-C in the middle of it."""
    loop.steps(2)
    if not odd:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.alarm(3)
    else:
        time.sleep(3)
        signal.raise_signal(signal.SIGINT)
    loop.steps(2)


def raises_in_the_probe(loop: Loop, odd: bool) -> None:
    """Each rank measures its GPU in `agree`."""

    def measure(*_: Any, meet: Callable[[], object], **__: Any) -> Any:
        if odd:
            raise ValueError("bad probe")
        return meet()

    def agree(mesh: Any, device: Any, *told: Any) -> Any:
        return cost_ranks.agree(mesh, torch.device("cuda"), *told)

    with (
        mock.patch("megacompile.api.agree", agree),
        mock.patch.object(cost_ranks, "cached_of_rank", lambda *_, **__: None),
        mock.patch.object(cost_ranks, "measure_of_rank", measure),
    ):
        loop.megacompile(Net())


def _traced(loop: Loop) -> package.Trace:
    with package.trace(loop.model) as trace:
        loop.steps(2)
    return trace


def _fails(*_: Any, **__: Any) -> Any:
    raise ValueError("bad trace")


def raises_in_compare_ranks(loop: Loop, odd: bool) -> None:
    trace = _traced(loop)
    with mock.patch.object(rank_steps, "rank_steps", _fails if odd else rank_steps.rank_steps):
        trace.compare_ranks()


def raises_in_a_trace_save(loop: Loop, odd: bool) -> None:
    trace = _traced(loop)
    document = _fails if odd else perfetto.document
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(perfetto, "document", document):
        trace.save(f"{folder}/trace.json")


class Beside(nn.Module):
    """Has a buffer beside what ranks share."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x * self.get_buffer("scale"))
        return result


def raises_before_buffers(loop: Loop, odd: bool) -> None:
    """A DistributedDataParallel sends buffers before each forward."""
    wrapped = DistributedDataParallel(Beside(loop.model).to(loop.device))
    for step in range(3):
        if odd and step == 1:
            raise ValueError("bad batch")
        wrapped(torch.ones(2, 8, device=loop.device)).backward()
        loop.update()


CASES: dict[str, tuple[Callable[[Loop, bool], None], int, dict[str, Any]]] = {
    # function, ranks, options: timeout_s of the process group, silent_s
    "raises_between": (raises_between, 2, {}),
    "raises_in_a_graph": (raises_in_a_graph, 2, {}),
    "skips_a_step": (skips_a_step, 2, {}),
    "raises_in_a_backward": (raises_in_a_backward, 2, {}),
    "is_killed": (is_killed, 3, {}),
    "is_killed_with_the_store": (rank_0_is_killed, 2, {}),
    "is_stopped": (is_stopped, 2, {"silent_s": 6}),
    "is_idle": (is_idle, 2, {"timeout_s": 6}),
    "is_killed_in_a_save": (is_killed_in_a_save, 2, {}),
    "saves_for_long": (saves_for_long, 2, {"patience_s": 5}),
    "saves_alone": (saves_alone, 2, {}),
    "saves_state_dicts_alone": (saves_state_dicts_alone, 2, {}),
    "works_for_long": (works_for_long, 2, {"patience_s": 5}),
    "ends_early": (ends_early, 2, {}),
    "exits": (exits, 2, {}),
    "other_micro_batches": (other_micro_batches, 2, {}),
    "accumulates_alone": (accumulates_alone, 4, {}),
    "evaluates": (evaluates, 3, {}),
    "does_not_clip": (does_not_clip, 2, {"timeout_s": 6}),
    "other_shapes": (other_shapes, 2, {}),
    "other_model": (other_model, 2, {}),
    "freezes_another": (freezes_another, 2, {}),
    "is_interrupted": (is_interrupted, 2, {}),
    "all_are_interrupted": (all_are_interrupted, 2, {}),
    "raises_in_the_probe": (raises_in_the_probe, 2, {}),
    "raises_in_compare_ranks": (raises_in_compare_ranks, 3, {}),
    "raises_in_a_trace_save": (raises_in_a_trace_save, 2, {}),
    "raises_before_buffers": (raises_before_buffers, 2, {}),
    "is_stopped_by_default": (is_stopped, 2, {}),
    "is_idle_by_default": (is_idle, 2, {}),
}


def ranks_of(case: str, kind: str) -> int:
    """How many ranks a case has: with GPUs two, or four."""
    count = CASES[case][1]
    return count // 2 * 2 if kind == "cuda" else count


def run_rank(case: str, rank: int, port: int, result: Path, kind: str) -> None:
    """One rank of a case, to the end of its process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    function, _, options = CASES[case]
    world = ranks_of(case, kind)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    rank_faults.SILENT_S = options.get("silent_s", rank_faults.SILENT_S)
    rank_faults.PATIENCE_S = options.get("patience_s", rank_faults.PATIENCE_S)
    seconds = options.get("timeout_s")
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=None if seconds is None else timedelta(seconds=seconds),
    )
    odd = rank == world - 1
    began_s = time.monotonic()
    facts: dict[str, Any] = {"error": "", "kind": ""}
    try:
        loop = Loop(rank, world, kind)
        loop.steps(1)
        began_s = time.monotonic()
        function(loop, odd)
    except BaseException as error:
        facts |= {"error": str(error), "kind": type(error).__name__}
        raise
    finally:
        facts["seconds"] = time.monotonic() - began_s
        result.write_text(json.dumps(facts))


class _Over(Exception):
    """A rank comes to the end of its script."""


class Case:
    """The ranks of a case; what they did is saved when all have ended."""

    def __init__(self, name: str, folder: Path, kind: str) -> None:
        self.name, self.folder = name, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.results = [folder / f"{name}.{rank}" for rank in range(ranks_of(name, kind))]
        self.pids: list[int] = []
        self.ends_s: dict[int, float] = {}
        self.began_s = time.monotonic()  # of the machine, so that processes compare it
        for rank, result in enumerate(self.results):
            self.pids.append(_started(name, rank, port, result, kind))

    def over(self) -> bool:
        """Have all ended? One that cannot end is killed behind the others."""
        left = [pid for pid in self.pids if pid not in self.ends_s]
        late = time.monotonic() - self.began_s > MOST_S
        if late or (left == self.pids[-1:] and self.name.startswith(("is_idle", "is_stopped"))):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.ends_s[pid] = time.monotonic()
        return len(self.ends_s) == len(self.pids)

    def save(self) -> list[dict[str, Any]]:
        """Write what each rank did."""
        ranks = []
        for pid, result in zip(self.pids, self.results, strict=True):
            facts = json.loads(result.read_text()) if result.exists() else {"kind": "none"}
            ranks.append({"pid": pid, "ended_s": self.ends_s[pid] - self.began_s, **facts})
        (self.folder / f"{self.name}.json").write_text(json.dumps(ranks))
        return ranks


def _started(case: str, rank: int, port: int, result: Path, kind: str) -> int:
    """The number of a rank's process: a fork, or a new one where a fork could not use its GPU."""
    if kind == "cuda":
        command = [sys.executable, "-m", "tests.ranks_faults", "--device", kind]
        command += ["--rank", str(rank), "--port", str(port), str(result), case]
        count = ranks_of(case, kind)
        first = count * ([*CASES].index(case) % (torch.cuda.device_count() // count))
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))}
        return os.posix_spawn(command[0], command, {**os.environ, **seen})
    pid = os.fork()
    if pid == 0:
        run_rank(case, rank, port, result, kind)
        raise _Over
    return pid


def run(folder: Path, cases: list[str], kind: str) -> None:
    """Run cases, a few at a time."""
    waiting, running = cases[::-1], list[Case]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(Case(waiting.pop(), folder, kind))
        for case in running[:]:
            if case.over():
                ranks = case.save()
                for facts in ranks if kind == "cuda" else ():
                    print(f"{case.name}: {facts}", flush=True)
                running.remove(case)
        time.sleep(0.05)


def main(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.rank is not None:
        run_rank(args.cases[0], args.rank, args.port, args.folder, args.device)
        return
    if args.device == "cpu":
        _warm_up()
    args.folder.mkdir(parents=True, exist_ok=True)
    run(args.folder, args.cases or [*CASES], args.device)


def _warm_up() -> None:
    model = megacompile(Net(), device="cpu")  # imports what takes long
    model(torch.ones(2, 8)).backward()
    torch.optim.AdamW(model.parameters()).step()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a new process
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main(_arguments())
    except _Over:
        pass
