"""What ranks check: `torchrun ... -m tests.ranks.script PART FOLDER cpu|cuda`.

Each rank runs the checks of a part, one after the other, until one fails: the others may wait for
this rank then. On `cuda` each has a GPU.
"""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import loops, modes, others, refusals, replicas, states, wrapped
from tests.ranks.here import Check, Here

TIMEOUT = datetime.timedelta(seconds=180)  # of a collective that another rank never comes to
PARTS: dict[str, dict[str, Check]] = {
    "two": {
        **states.TWO,
        **refusals.TWO,
        **refusals.EXPLAINED,
        **loops.TWO,
        **wrapped.TWO,
        **modes.checks(modes.TWO),
    },
    "more": {**states.MORE, **wrapped.MORE, **modes.checks(modes.NUMBERS | modes.CODE)},
    "loops": loops.MORE,
    "four": {**modes.checks(modes.FOUR), **states.FOUR, **refusals.FOUR},
    "replicas": {**modes.checks(modes.REPLICATED, sizes=(2, 2)), **replicas.FOUR},
    "more replicas": modes.checks(modes.MORE_REPLICATED, sizes=(2, 2)),
    "three replicas": modes.checks(modes.THREE_REPLICAS, sizes=(3, 2)),
    "gpus": modes.checks(modes.ON_GPUS),
    **others.PARTS,
}


def main(part: str, folder: Path, device: str, only: str = "") -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    here = Here(init_device_mesh(device, (dist.get_world_size(),)), folder)
    if part == "float8":  # torchao may not be there
        PARTS[part] = importlib.import_module("tests.ranks.float8").TWO
    for name, check in PARTS[part].items():
        if only in name:
            start = time.process_time()
            check(here)
            dist.barrier()
            torch.compiler.reset()
            if here.rank == 0:
                print(f"{name}: {time.process_time() - start:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *sys.argv[4:])
