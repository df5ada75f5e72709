"""`python -m megacompile bench`, with the tiny model on the CPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from megacompile.cli import main
from tests.processes import python

TINY = ("bench", "--device", "cpu", "--models", "tiny", "--batch", "2", "--seq", "16")
WIDTH, INNER, HEAD, CLASSES = 128, 256, 64, 512
LAYER = (2 * WIDTH + 1) * WIDTH + (2 * WIDTH + 2) * HEAD + 3 * WIDTH * INNER + 2 * WIDTH


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


def check(result: dict[str, Any], mode: str) -> None:
    assert (result["mode"], result["model"], result["tokens"]) == (mode, "tiny", "2x16")
    assert result["step_s"] > 0 and result["first_s"] > 0
    assert result["tokens_s"] == pytest.approx(32 / result["step_s"])
    parameters = result["tflop_s"] * 1e12 / 6 / result["tokens_s"]
    assert parameters == pytest.approx(2 * LAYER + WIDTH + CLASSES * WIDTH), "the head is tied"
    assert 5 < result["loss"] < 7  # of 512 classes, from random weights


def test_json_has_a_result_for_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--modes", "streamed", "plain", "--json"]) == 0
    out, said = capsys.readouterr()
    beginning, *cases = said.splitlines()
    assert beginning.startswith("megacompile: bench on cpu")
    assert [line.split(":")[1] for line in cases] == [" tiny, streamed", " tiny, plain"]
    ours, plain = json.loads(out)
    check(ours, "streamed")
    check(plain, "plain")
    assert ours["peak_bytes"]["host"] > 0 and plain["predicted_s"] is None
    assert ours["loss"] == pytest.approx(plain["loss"], abs=0.02)  # bf16


def test_without_transformers_no_case_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(list(TINY)) == 2
    out, said = capsys.readouterr()
    beginning, error = said.splitlines()
    assert out == "" and error.endswith("pip install transformers"), beginning


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
from megacompile.cli import main
print(main(["bench", "--device", "cpu", "--models", "7.6B", "--modes", "plain", "--batch", "1"]))
"""


def test_a_mode_that_no_model_fits_has_a_line() -> None:
    _, line, code = python("-c", LIMITED).stdout.splitlines()
    assert (line, code) == ("7.6B, plain, 1x1024: it does not fit", "1")


@pytest.mark.thorough
def test_every_mode_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(TINY)) == 0
    machine, *lines = capsys.readouterr().out.splitlines()
    assert machine.startswith("torch ")
    modes = ["planned", "streamed", "backward", "plain", "torch.compile"]
    assert [line.partition(", 2x16: ")[0] for line in lines] == [f"tiny, {m}" for m in modes]
    assert all("a step" in line and "first step" in line for line in lines)
