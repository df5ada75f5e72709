"""Ranks of which the last does something else: `python -m tests.ranks.faults FOLDER CASE...`.

Each case is a few processes that train together, forked from this one, so that torch is imported
once; they end as other processes do. What each rank raised and when it ended is saved into
`FOLDER/found.json`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megacompile as package
from megacompile import megacompile
from tests.zoo import Tower

MOST_S = 300.0  # a rank that has not ended by then is killed
AGES = 1000.0  # seconds that nobody waits


def net() -> Any:
    layers = (nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2)) for _ in range(2))
    way: Any = lambda layer, x: x + torch.tanh(layer[0](x)) * layer[1](x)  # noqa: E731
    return Tower(layers, way)


class Loop:
    """A training loop of one rank, to be spoilt."""

    def __init__(self, rank: int, world: int, **options: Any) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        self.model = net()
        megacompile(self.model, mesh=mesh, device="cpu", lowering="eager", resident=0, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss(self) -> Tensor:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(self.rank))
        return self.model(x)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loss().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()


# The cases. The last rank is the one that does something else.


def finds_nan(loop: Loop, odd: bool) -> None:
    """It raises in the middle of a backward (`detect_anomaly`)."""
    loss = loop.loss()
    (loss * torch.nan if odd else loss).backward()
    loop.steps(1)


def is_killed(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    loop.steps(2)


def is_killed_with_the_store(loop: Loop, odd: bool) -> None:
    """Here the first rank is: it has what ranks tell each other by."""
    is_killed(loop, loop.rank == 0)


def is_stopped(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    loop.steps(2)


def exits(loop: Loop, odd: bool) -> None:
    loop.steps(2)
    if odd:
        sys.exit(3)
    loop.steps(1)


def saves_alone(loop: Loop, odd: bool) -> None:
    if odd:
        with tempfile.TemporaryDirectory() as folder:
            package.save(loop.model, folder)
    loop.steps(1)


def evaluates(loop: Loop, odd: bool) -> None:
    loop.steps(1)
    if odd:
        with torch.no_grad():
            loop.loss()
    loop.steps(1)


def freezes_another(loop: Loop, odd: bool) -> None:
    """As many bytes of gradients, of other parameters: they would be averaged with one another."""
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
        others: a pattern of what the others raise.
        ranks: how many there are.
        always: not only by `make thorough`.
    """

    run: Callable[[Loop, bool], None]
    odd: str
    others: str
    ranks: int = 2
    always: bool = False


WAITS = r"rank {rank} waits in \S+ALL_GATHER@\d of .* of the forward of Tower for rank "
SILENT = "which has sent no sign of life for 30 s"
FAULTS = (
    Fault(is_killed, "none", WAITS + f"2, {SILENT}", ranks=3, always=True),
    Fault(is_killed_with_the_store, "RankError", "store .* does not answer"),
    Fault(finds_nan, "AnomalyError", r"rank 1, which raised AnomalyError: .* of", always=True),
    Fault(saves_alone, "RankError", r"(save\(\) of Tower .* rank 0|forward of Tower .* rank 1)"),
    Fault(is_stopped, "none", WAITS + f"1, {SILENT}"),
    Fault(exits, "SystemExit", WAITS + r"1, which has ended \(its script ended\), after the"),
    Fault(all_are_interrupted, "KeyboardInterrupt", "", always=True),
    Fault(
        evaluates,
        "RankError",
        r"the (forward of Tower .* rank \d the back|backward of Tower .* rank \d the for)ward",
        always=True,
    ),
    Fault(freezes_another, "RankError", r"layers\.1\.\d\.weight\) in rank \d and", always=True),
)
CASES = {fault.run.__name__: fault for fault in FAULTS}


def run_rank(name: str, rank: int, port: int, result: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    case = CASES[name]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=case.ranks)
    began_s = time.monotonic()
    facts: dict[str, Any] = {"error": "", "kind": ""}
    try:
        loop = Loop(rank, case.ranks, detect_anomaly=case.run is finds_nan)
        loop.steps(1)
        began_s = time.monotonic()
        case.run(loop, rank == case.ranks - 1)
    except BaseException as error:
        facts |= {"error": str(error), "kind": type(error).__name__}
        raise
    finally:
        facts["at"] = time.monotonic()  # of the machine: processes compare it
        facts["seconds"] = facts["at"] - began_s
        result.write_text(json.dumps(facts))


class _Over(Exception):
    """A rank comes to the end of its script."""


def start(name: str, folder: Path) -> dict[int, Path]:
    """Start the ranks of a case: the numbers of their processes, and what each of them writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {}
    for rank in range(CASES[name].ranks):
        result = folder / f"{name}.{rank}"
        pid = os.fork()
        if pid == 0:
            run_rank(name, rank, port, result)
            raise _Over
        pids[pid] = result
    return pids


def run(folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run cases at once; what each rank of them did."""
    began_s, ends_s = time.monotonic(), dict[int, float]()
    cases = {name: start(name, folder) for name in names}
    while any(pids.keys() - ends_s.keys() for pids in cases.values()):
        for name, pids in cases.items():
            left = [pid for pid in pids if pid not in ends_s]
            stopped = name == "is_stopped" and left == [*pids][-1:]
            if stopped or time.monotonic() - began_s > MOST_S:  # it cannot end
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


def main(folder: Path, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = megacompile(net(), device="cpu")  # imports what takes long
    model(torch.ones(2, 8)).backward()
    torch.optim.AdamW(model.parameters()).step()
    (folder / "found.json").write_text(json.dumps(run(folder, [*names])))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except _Over:
        pass
