"""Warnings point at the user's line, whatever hooks and wrappers are between it and the text."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, NAdam
from torch.optim.lr_scheduler import LambdaLR

from megacompile import megacompile, notices


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def in_eager(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight  # type: ignore[no-any-return]


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = in_eager(self.b, self.a(x))
        return result


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    (model.a(torch.ones(2, 8)).sum() + model.b.weight.square().sum()).backward()
    optimizer.step()  # the line


def outside(model: nn.Module) -> None:
    step(model, SGD(model.parameters(), lr=0.1))


def outside_with_a_scheduler(model: nn.Module) -> None:
    """It wraps `optimizer.step`."""
    optimizer = SGD(model.parameters(), lr=0.1)
    LambdaLR(optimizer, lambda step: 1.0)
    step(model, optimizer)


def another_optimizer(model: nn.Module) -> None:
    optimizer = NAdam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # the line


def shared(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    kept = [value.view(-1) for value in state.values()]
    model(torch.ones(2, 8))  # the line
    del kept


def compiled(model: nn.Module) -> None:
    model.compile()  # the line


def broken(model: nn.Module) -> None:
    model(torch.ones(2, 8))  # the line


CASES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "outside": (outside, "have gradients that no schedule"),
    "outside, scheduler": (outside_with_a_scheduler, "have gradients that no schedule"),
    "another optimizer": (another_optimizer, "NAdam"),
    "shared": (shared, "shares its memory"),
    "compile()": (compiled, "compile() does nothing"),
    "graph break": (broken, "runs in eager mode"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_points_at_the_users_line(case: str) -> None:
    run, text = CASES[case]
    model = megacompile((Breaks if case == "graph break" else Net)(), device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    (said,) = [each for each in caught if text in str(each.message)]
    assert said.filename == __file__
    with open(__file__) as file:
        assert "# the line" in file.readlines()[said.lineno - 1]


def test_once_for_a_line() -> None:
    """Python's own filter counts by the line that is shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            notices.warn("a text")
        notices.warn("a text")
    assert len(caught) == 2
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_say_once_what_is_the_same(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the first one of another host. Without the process group, it is no rank."""
    monkeypatch.setattr(notices, "_rank", None)
    monkeypatch.setenv("LOCAL_RANK", {0: "0", 1: "0", 2: "1"}[rank])
    there = True
    notices.in_rank(rank, is_first=rank == 0, is_there=lambda: there)
    notices.in_rank(rank, is_first=False, is_there=lambda: there)  # of another mesh

    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for whose in notices.Whose:
                notices.warn(whose.name, whose)
        return [str(each.message) for each in caught]

    assert said() == ["ALL", "HOST", "RANK"][rank:2] + [f"rank {rank}: RANK"]
    there = False
    assert said() == ["ALL", "HOST", "RANK"]


def test_in_a_thread_of_ours() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=notices.warn, args=("a text",))
        thread.start()
        thread.join()
    assert [each.filename for each in caught] == [notices.__file__]
