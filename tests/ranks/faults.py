"""Ranks of which one does something else: `python -m tests.ranks.faults FOLDER CASE...`.

Each case is a few processes that train together, forked from this one, so that torch is imported
once; they end as other processes do. What each rank raised and when it ended is saved into
`FOLDER/found.json`. Without a case all are run.

`--device cuda` runs them with NCCL, in new processes, and prints what each rank did, for people to
read.
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megacompile as package
from megacompile import megacompile

MOST_S = 300.0  # a rank that has not ended by then is killed
AGES = 1000.0  # seconds that nobody waits


class Net(nn.Module):
    """Some layers, of two parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            gate, up = layer.children()
            x = x + torch.tanh(gate(x)) * up(x)
        return x.square().mean()


class Loop:
    """A training loop of one rank, to be spoilt."""

    def __init__(self, rank: int, world: int, kind: str, **options: Any) -> None:
        self.rank, self.world = rank, world
        self.device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        self.mesh = init_device_mesh(kind, (world,))
        torch.manual_seed(0)
        self.model = self.megacompile(Net(), resident=0, **options)
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


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def finds_nan(loop: Loop, odd: bool) -> None:
    """It raises in the middle of a backward (`detect_anomaly`)."""
    loss = loop.loss()
    (loss * torch.nan if odd else loss).backward()
    loop.steps(1)


def is_killed(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        kill()
    loop.steps(2)


def rank_0_is_killed(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if loop.rank == 0:
        kill()
    loop.steps(2)


def saves_alone(loop: Loop, odd: bool) -> None:
    if odd:
        with tempfile.TemporaryDirectory() as folder:
            package.save(loop.model, folder)
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


def other_shapes(loop: Loop, odd: bool) -> None:
    """No fault where the collectives are the same."""
    for step in range(3):
        loop.loss(rows=3 if odd and step else 2).backward()
        loop.update()


def freezes_another(loop: Loop, odd: bool) -> None:
    """As many bytes of gradients, of other parameters."""
    loop.model.layers[1][odd].weight.requires_grad_(False)
    loop.loss().backward()


def all_are_interrupted(loop: Loop, odd: bool) -> None:
    """Those that wait get Ctrl-C in the middle of it."""
    loop.steps(2)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    if odd:
        time.sleep(AGES)
    loop.steps(2)


@dataclass(frozen=True)
class Fault:
    """A case.

    Attributes:
        run: what each rank does.
        odd: what the one that goes wrong raises; "none": it says nothing any more.
        others: a pattern of what the others raise; "": nothing.
        ranks: how many there are.
        timeout_s: of the process group.
        always: not only by `make thorough`.
    """

    run: Callable[[Loop, bool], None]
    odd: str
    others: str
    ranks: int = 2
    timeout_s: float | None = None
    always: bool = False
    detect_anomaly: bool = False


WAITS = r"rank {rank} waits in \S+ALL_GATHER@\d of .* of the forward of Net for rank "
KILLED = r"which was killed \(process \d+\)"
LATE = r"1, which has not come there .* has done nothing for"
DIFFER = r"collective \d+ is .* in rank \d and .* in rank \d; needed the same"
CASES: dict[str, Fault] = {
    "is_killed": Fault(is_killed, "none", WAITS + f"2, {KILLED}", 3, always=True),
    "is_killed_with_the_store": Fault(
        rank_0_is_killed, "RankError", "store .* does not answer|which was killed", always=True
    ),
    "finds_nan": Fault(
        finds_nan,
        "AnomalyError",
        r"rank 1, which raised AnomalyError: .*, in \d\w+ of",
        always=True,
        detect_anomaly=True,
    ),
    "saves_alone": Fault(
        saves_alone,
        "RankError",
        r"about to run the (save\(\) of Net, rank 0|forward of Net, rank 1)",
    ),
    "is_stopped": Fault(is_stopped, "none", WAITS + "1, which has given no sign of life for 30 s"),
    "is_idle": Fault(is_idle, "none", WAITS + LATE, timeout_s=6),
    "exits": Fault(
        exits, "SystemExit", WAITS + r"1, which has ended \(SystemExit, as of", always=True
    ),
    "all_are_interrupted": Fault(all_are_interrupted, "KeyboardInterrupt", "", always=True),
    "other_micro_batches": Fault(
        other_micro_batches, "RankError", r"has made \d steps .* and rank \d \d;"
    ),
    "accumulates_alone": Fault(accumulates_alone, "RankError", DIFFER, 4),
    "evaluates": Fault(
        evaluates,
        "RankError",
        r"the (forward of Net, rank \d the back|backward of Net, rank \d the for)ward",
        always=True,
    ),
    "freezes_another": Fault(
        freezes_another, "RankError", r"layers\.1\.\d\.weight\) in rank \d and"
    ),
    "other_shapes": Fault(other_shapes, "", ""),
}


def ranks_of(case: str, kind: str) -> int:
    """How many ranks a case has: with GPUs two, or four."""
    count = CASES[case].ranks
    return count // 2 * 2 if kind == "cuda" else count


def run_rank(name: str, rank: int, port: int, result: Path, kind: str) -> None:
    """One rank of a case, to the end of its process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    case, world = CASES[name], ranks_of(name, kind)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=None if case.timeout_s is None else timedelta(seconds=case.timeout_s),
    )
    began_s = time.monotonic()
    facts: dict[str, Any] = {"error": "", "kind": ""}
    options = {"detect_anomaly": case.detect_anomaly}
    try:
        loop = Loop(rank, world, kind, **options)
        loop.steps(1)
        began_s = time.monotonic()
        case.run(loop, rank == world - 1)
    except BaseException as error:
        facts |= {"error": str(error), "kind": type(error).__name__}
        raise
    finally:
        facts["at"] = time.monotonic()  # of the machine: processes compare it
        facts["seconds"] = facts["at"] - began_s
        result.write_text(json.dumps(facts))


class _Over(Exception):
    """A rank comes to the end of its script."""


def start(name: str, folder: Path, kind: str) -> dict[int, Path]:
    """Start the ranks of a case: the numbers of their processes, and what each of them writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks_of(name, kind)):
        result = folder / f"{name}.{rank}"
        if kind == "cuda":  # a fork could not use its GPU
            command = [sys.executable, "-m", "tests.ranks.faults", "--device", kind]
            command += ["--rank", str(rank), "--port", str(port), str(result), name]
            pid = os.posix_spawn(command[0], command, os.environ)
        else:
            pid = os.fork()
            if pid == 0:
                run_rank(name, rank, port, result, kind)
                raise _Over
        pids[pid] = result
    return pids


def run(folder: Path, names: list[str], kind: str) -> dict[str, list[dict[str, Any]]]:
    """Run cases at once, on GPUs one after the other; what each rank of them did."""
    began_s, ends_s = time.monotonic(), dict[int, float]()
    cases = {name: start(name, folder, kind) for name in names}
    while any(pids.keys() - ends_s.keys() for pids in cases.values()):
        for name, pids in cases.items():
            left = [pid for pid in pids if pid not in ends_s]
            idle = left == [*pids][-1:] and name.startswith(("is_idle", "is_stopped"))
            if idle or time.monotonic() - began_s > MOST_S:  # it cannot end
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
        ended, _ = os.waitpid(-1, os.WNOHANG)
        if ended:
            ends_s[ended] = time.monotonic()
        else:
            time.sleep(0.05)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, pids in cases.items():
        for pid, result in pids.items():
            facts: dict[str, Any] = {"kind": "none"}
            if result.exists():
                facts = json.loads(result.read_text())
            facts |= {"pid": pid, "ending_s": ends_s[pid] - facts.pop("at", ends_s[pid])}
            found.setdefault(name, []).append(facts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a new process
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.rank is not None:
        run_rank(args.cases[0], args.rank, args.port, args.folder, args.device)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    names = args.cases or [*CASES]
    if args.device == "cuda":
        for name in names:
            print(*run(args.folder, [name], args.device)[name], sep="\n", flush=True)
        return
    model = megacompile(Net(), device="cpu")  # imports what takes long
    model(torch.ones(2, 8)).backward()
    torch.optim.AdamW(model.parameters()).step()
    (args.folder / "found.json").write_text(json.dumps(run(args.folder, names, args.device)))


if __name__ == "__main__":
    try:
        main()
    except _Over:
        pass
