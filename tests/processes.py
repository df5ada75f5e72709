"""Threads, processes of `torchrun`, forked children, and a process group of this process alone."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parent.parent
CHILD_LIMIT_S = 60
trains_in_a_child = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch's autograd refuses to run in a forked child"
)


def python(
    *arguments: str, folder: Path = ROOT, timeout_s: float = 300, **environ: str
) -> subprocess.CompletedProcess[str]:
    """What another process of this interpreter says, which ends well."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def torchrun(
    module: str, *arguments: str, ranks: int, timeout_s: float, device: str = "cpu"
) -> None:
    """Run a module in several processes that end, whatever happens; on "cpu" they see no GPU."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", module, *arguments]
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **hidden},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = started.communicate(timeout=timeout_s)
    finally:
        if started.poll() is None:
            started.terminate()  # it ends its workers then
            try:
                started.wait(30)
            finally:
                started.kill()
    assert started.returncode == 0, said


def in_child(function: Callable[[], Any], limit_s: int = CHILD_LIMIT_S) -> Any:
    """Return the result of `function` in a forked child; raises AssertionError where it dies."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)  # a child that hangs ends
        code = 1
        try:
            os.close(read)
            found = pickle.dumps(function())
            with os.fdopen(write, "wb") as file:
                file.write(found)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return pickle.loads(found)


def in_threads(calls: list[Callable[[], Any]]) -> None:
    """All at once, with many switches; which come when is up to Python: a fault may come and go."""
    failed: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> None:
        begin.wait()
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failed:
        raise failed[0]


@contextmanager
def group_of_one(timeout: timedelta | None = None, backend: str = "gloo") -> Iterator[None]:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
