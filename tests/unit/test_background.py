"""The threads behind `optimizer.step()` at the end of the process."""

from __future__ import annotations

from tests.processes import python

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
    done = python("-c", TRAINING + script)
    assert done.stderr == ""
    assert done.stdout.split() == ["same"] * 3
