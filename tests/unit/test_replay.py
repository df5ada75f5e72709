"""Replays of a function: Ctrl-C, and captures that fail. Of models: equality/test_replay.py."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch
from torch import Tensor

from megacompile.runtime.device.replay import CudaGraphs, Replay
from tests.equality.test_replay import Emulated
from tests.interrupts import Places


def test_interrupts() -> None:
    """Wherever Ctrl-C comes, the calls after that have the numbers of the code."""
    place, stopped = 0, True
    while stopped:
        place += 1
        replay = Replay(Emulated(), weakref.WeakSet(), 1, in_place=[], given_away=[0], leaves=True)
        places = Places(place, "replay")
        stopped = False
        for k in range(7):
            x = torch.full((3,), float(k))
            sys.settrace(places)
            try:
                found = replay(_doubled, [x])
            except KeyboardInterrupt:
                stopped = True
                continue
            finally:
                sys.settrace(None)
            assert found[0] is not None and found[0].equal(2 * x), places.stopped
        stopped = stopped or bool(places.stopped)
    assert place > 20


def _doubled(inputs: list[Tensor]) -> list[Tensor]:
    return [inputs[0] * 2]


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_no_trace() -> None:
    """Random numbers, graphs from before it, and later captures go on."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, x = CudaGraphs(device), torch.ones(3, device=device)
    before, there = graphs.capture(
        lambda inputs: [inputs[0] + torch.rand(3, device=device)], [x], leaves=False
    )
    for leaves in (False, True):
        with pytest.raises(RuntimeError):
            graphs.capture(lambda inputs: [inputs[0] * inputs[0].sum().item()], [x], leaves=leaves)
        torch.manual_seed(0)
        expected = x + torch.rand(3, device=device)
        torch.manual_seed(0)
        graphs.follow()
        before()
        assert there[0] is not None and there[0].equal(expected)
        later, result = graphs.capture(lambda inputs: [inputs[0] * 2], [x], leaves=leaves)
        later()
        assert result[0] is not None and result[0].equal(2 * x)
