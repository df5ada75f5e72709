"""The threads behind `optimizer.step()`: when they begin, when they end, and without them."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest

from megacompile.runtime.device import background
from megacompile.runtime.device.background import Background, fulfil

ROOT = Path(__file__).parent.parent
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
ENDS = {
    "in a thread while the main thread ends": "in_a_thread()",
    "in a thread, begun before": "train(models()[1]); in_a_thread()",
    "at exit": "atexit.register(compare)",
    "with an update in flight": "compare(); train(models()[1])",
}


def ends(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("how", ENDS)
def test_training_at_the_end_of_the_process(how: str) -> None:
    script = TRAINING + ENDS[how]
    done = ends(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert set(done.stdout.split()) == {"same"}


def test_what_was_given_is_finished_at_the_end() -> None:
    script = """
        import time
        from megacompile.runtime.device.background import Background
        def work():
            time.sleep(0.2)
            print("done", flush=True)
        Background("test").submit(work)
    """
    assert ends(textwrap.dedent(script)).stdout == "done\n"


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
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "of this test")
    assert thread.daemon
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None
    thread.join(60)
    assert not thread.is_alive()


def test_what_was_given_is_done_though_its_owner_is_gone() -> None:
    owner, may, over = Background("gone"), threading.Event(), threading.Event()

    def waits() -> None:
        may.wait(60)

    owner.submit(waits)
    owner.submit(over.set)
    del owner
    gc.collect()
    may.set()
    assert over.wait(60)


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


def test_two_that_were_started_are_one() -> None:
    """Ctrl-C may hide that a thread was started."""
    queue, over = background._Queue(), threading.Event()
    threads = [
        threading.Thread(target=queue._until_the_end, args=((),), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    queue.work.put(over.set)
    assert over.wait(60)
    queue.work.put(None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_future_that_was_cancelled_is_not_done() -> None:
    log: list[str] = []
    first, second = Future[None](), Future[None]()
    first.cancel()
    fulfil(first, lambda: log.append("first"))
    fulfil(second, lambda: log.append("second"))
    assert log == ["second"] and second.done()
