"""Buckets move to where the plan wants them before anything runs, where a call can begin again."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.plan.pipeline import Pipeline
from tests import inside


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).relu())
        loss: Tensor = self.norm(x).square().mean()
        return loss


class Talks(Net):
    """A line that Dynamo does not capture comes first."""

    def forward(self, x: Tensor) -> Tensor:
        _note(self)
        return super().forward(x)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _note(net: Net) -> None:
    net.calls += 1


def residents(model: nn.Module) -> list[bool]:
    return [b.resident is not None for b in inside.streamed(model).machine.buckets.values()]


def run(model: nn.Module, steps: int) -> list[Tensor]:
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        torch.manual_seed(seed)
        loss = model(torch.ones(4, 8) * seed + torch.arange(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def make(kind: type[Net], **options: Any) -> Any:
    torch.manual_seed(0)
    return megacompile(kind(), device="cpu", gpu_memory="1MiB", **options)


def test_the_first_call_has_them_where_they_belong() -> None:
    torch.manual_seed(0)
    plain = Net()
    model = make(Net)
    stages = mock.patch.object(Pipeline, "_stages_of", autospec=True, side_effect=_stages_of)
    with stages as partitions:
        torch.manual_seed(5)
        model(torch.ones(4, 8) + torch.arange(8))
        assert all(residents(model))
        (first,) = schedules(model)
        losses = run(model, 3)
        assert partitions.call_count == 1 and schedules(model) == [first]
    torch.manual_seed(5)
    plain(torch.ones(4, 8) + torch.arange(8))
    assert all(map(torch.equal, losses, run(plain, 3)))
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("held", [False, True])
def test_another_name_of_what_moves_is_told_of(*, held: bool) -> None:
    model = make(Net)
    state = model.state_dict() if held else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model, 2)
    assert all(residents(model))
    found = [w for w in said if "layers.0.weight shares its memory" in str(w.message)]
    assert len(found) == held
    del state


_stages_of = Pipeline._stages_of


def test_what_has_run_is_not_run_again() -> None:
    torch.manual_seed(0)
    plain, model = Talks(), make(Talks)
    torch.manual_seed(7)
    assert torch.equal(model(torch.eye(8)), (torch.manual_seed(7), plain(torch.eye(8)))[1])
    assert model.calls == plain.calls
    assert not any(residents(model)), "not in this call"
    assert all(map(torch.equal, run(model, 3), run(plain, 3)))
    assert all(residents(model)) and model.calls == plain.calls


def test_an_error_in_the_second_try_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first try is left behind."""
    model = make(Net)
    streamed = inside.streamed(model)
    moved = streamed.buckets.move_if_wanted

    def fails() -> None:
        moved()
        raise KeyboardInterrupt

    monkeypatch.setattr(streamed.buckets, "move_if_wanted", fails)
    with pytest.raises(KeyboardInterrupt):
        streamed._undone(streamed._compile(model), (torch.ones(4, 8),), {}, [])
    monkeypatch.undo()
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(torch.isfinite(loss) for loss in run(model, 2))
