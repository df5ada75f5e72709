"""examples/quickstart.ipynb: its cells run in order, and it is committed without outputs."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

from tests.sources import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells() -> list[tuple[str, str]]:
    """The kind and the text of each cell."""
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    assert [each.get("outputs") for each in found if each.get("outputs")] == []
    return [(each["cell_type"], "".join(each["source"])) for each in found]


def test_a_text_comes_before_each_of_five_cells_of_code() -> None:
    assert [kind for kind, _ in cells()] == ["markdown", "code"] * 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_cells_run(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They compare the losses with the plain model's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    module = types.ModuleType("quickstart")  # Dynamo imports it by its name
    monkeypatch.setitem(sys.modules, "quickstart", module)
    for kind, source in cells():
        if kind == "code":
            exec(compile(source, str(NOTEBOOK), "exec"), vars(module))
    shown = capsys.readouterr().out
    assert shown.count(" streamed, ") == 5 and f"128 MiB allowed, on {device}" in shown
    for name in ("8F", "PREFETCH@", "UPDATE"):  # the model is streamed
        assert name in shown
    assert "what would help" in shown
