"""The threads behind `optimizer.step()`: when they begin, when they end, and without them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest

from megacompile.runtime.device.background import Background, fulfil

ROOT = Path(__file__).parent.parent.parent
TRAINING = """
import atexit, sys, threading, torch
from torch import nn
from megacompile import megacompile

torch.set_num_threads(1)

def train(model):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

def models():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    streamed = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    streamed.load_state_dict(plain.state_dict())
    return plain, megacompile(streamed, device="cpu", lowering="eager")

def compare():
    plain, streamed = models()
    train(plain)
    train(streamed)
    same = all(map(torch.equal, plain.parameters(), streamed.parameters()))
    print("same" if same else "differs", flush=True)

def in_a_thread(run=compare):
    def late():
        threading.main_thread().join()
        run()
    threading.Thread(target=late).start()

"""


def test_training_at_the_end_of_the_process() -> None:
    """In a thread, at exit, with an update in flight."""
    script = "compare(); in_a_thread(); atexit.register(compare); kept = models()[1]; train(kept)"
    done = subprocess.run(
        [sys.executable, "-c", TRAINING + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["same"] * 3


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_thread_begins_with_the_first_work_and_ends_with_its_owner() -> None:
    owner, log = Background("of this test"), list[int]()
    assert "of this test" not in names()
    over = threading.Event()
    for i in range(100):
        owner.submit(lambda i=i: log.append(i))  # type: ignore[misc]
    owner.submit(over.set)
    assert over.wait(60) and log == list(range(100))
    assert owner.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        owner.call(lambda: 1 // 0)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "of this test")
    assert thread.daemon
    alive, may, last = weakref.ref(owner), threading.Event(), threading.Event()
    owner.submit(lambda: may.wait(60))  # type: ignore[arg-type]
    owner.submit(last.set)
    del owner
    gc.collect()
    assert alive() is None
    may.set()
    assert last.wait(60), "what was given is done"
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_raises_stops_nothing() -> None:
    """It must not: that it does is said, and what is behind it is done."""
    owner = Background("raises")
    owner.submit(lambda: 1 / 0)  # type: ignore[arg-type]
    assert owner.call(lambda: "behind") == "behind"


def test_the_caller_does_it_where_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    owner, log = Background("none"), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        owner.submit(lambda: log.append(threading.current_thread().name))
    assert log == [threading.current_thread().name]
    over = threading.Event()
    owner.submit(over.set)
    assert over.wait(60) and "none" in names()


def test_a_future_that_was_cancelled_is_not_done() -> None:
    log: list[str] = []
    first, second = Future[None](), Future[None]()
    first.cancel()
    fulfil(first, lambda: log.append("first"))
    fulfil(second, lambda: log.append("second"))
    assert log == ["second"] and second.done()
