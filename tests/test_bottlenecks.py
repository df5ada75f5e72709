"""The benchmark of staged bottlenecks: what it stages is predicted, and a small one runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import bottlenecks


def test_what_is_staged_is_what_is_predicted() -> None:
    """Of the situation that takes a moment to build; `--predict` shows all four."""
    (row,) = bottlenecks.main(["--predict", "--only", "activations offloaded"])
    assert (row["staged"], row["explain"], row["right"]) == ("d2h", "d2h", "yes")


def test_another_bound_than_the_staged_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (staged,) = (s for s in bottlenecks.SITUATIONS if s.name == "activations offloaded")
    resident = {**staged.options, "activations": "recompute"}
    other = bottlenecks.Staged("kept on the device", "d2h", staged.model, staged.inputs, resident)
    monkeypatch.setattr(bottlenecks, "SITUATIONS", (other,))
    (row,) = bottlenecks.main(["--predict"])
    assert (row["explain"], row["right"]) == ("compute", "NO")


def test_it_trains_traces_and_holds_both_against_what_was_staged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    def small(device: str) -> nn.Module:
        return bottlenecks.Blocks(32, (16, 16))

    def broken(device: str) -> nn.Module:
        raise RuntimeError("too small\nor so")

    def features(device: str) -> torch.Tensor:
        return torch.randn(2, 4, bottlenecks._FEATURES)

    scenarios = tuple(
        bottlenecks.Staged(name, bound, model, features, {"activations": "recompute"})
        for name, bound, model in (("one", "compute", small), ("two", "d2h", broken))
    )
    monkeypatch.setattr(bottlenecks, "SITUATIONS", scenarios)
    rows = bottlenecks.main(["--device", "cpu", "--steps", "2", "--save", f"{tmp_path}/t"])
    assert rows[0]["traced"] in ("compute", "h2d", "d2h", "host")
    assert rows[0]["so it was"] == ("yes" if rows[0]["traced"] == "compute" else "NO")
    assert "critical path" in str(list(rows[0])) and float(str(rows[0]["traced s"])) > 0
    assert rows[1]["right"] == "failed: RuntimeError: too small"
    with pytest.raises(SystemExit):
        bottlenecks.main(["--steps", "1"])
