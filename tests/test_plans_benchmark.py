"""`python -m benchmarks.plans`: which predicted steps got longer than those of a kept table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_cases, plans
from benchmarks.plan_cases import Case

SHAPE = {"width": 256, "intermediate": 512, "vocabulary": 1000, "kv_heads": 2}
TINY = Case("tiny", 1, 1, SHAPE, 2, 64, state_dtype="int8", in_backward=True, disk=True)
NARROW = Case("tiny", 1, 1, SHAPE, 2, 64, gpu="3080", device_gib=1, link_gb_s=12.0)
COMMAND = ["--cases", "tiers", "--compare"]


def test_a_step_that_got_longer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: dict[str, float | None] = {TINY.name: 1.0, NARROW.name: 2.0}
    monkeypatch.setattr(plan_cases, "TIERS", (TINY, NARROW))
    monkeypatch.setattr(plan_cases, "row", lambda case: {"step_s": steps[case.name]})
    for kept in (tmp_path / "kept.md", tmp_path / "kept.json"):
        steps[NARROW.name] = 2.0
        assert plans.main(["--cases", "tiers", "--out", str(kept)]) == 0
        capsys.readouterr()
        steps[NARROW.name] = 2.009
        assert plans.main([*COMMAND, str(kept)]) == 0
        assert f"no step is longer than in {kept}" in capsys.readouterr().out
        steps[NARROW.name] = 2.02
        assert plans.main([*COMMAND, str(kept)]) == 1
        out = capsys.readouterr().out
        assert f"{NARROW.name}: 2.02 s, was 2 s (+1.0%)" in out and f"{TINY.name}: " not in out
        steps[NARROW.name] = None
        assert plans.main([*COMMAND, str(kept)]) == 1
        assert plans.main([*COMMAND, str(kept), "--only", "h200"]) == 0


def test_which_are_longer() -> None:
    def found(now: Any, before: Any) -> list[str]:
        return plans.longer([{"case": "a", "step_s": now}], {"a": before})

    assert found(1.0049, 1.0) == [] and found(0.5, 1.0) == []
    assert found(1.0051, 1.0) == ["a: 1.005 s, was 1 s (+0.5%)"]
    assert found(None, 2.0) == ["a: does not fit; it took 2 s"]
    assert found(2.0, None) == []
    assert plans.longer([{"case": "new", "step_s": 1.0}], {"a": 0.5}) == []


def test_cases_differ_and_say_what_they_are() -> None:
    names = [case.name for case in plan_cases.TIERS]
    assert len({*names}) == len(names) >= 20
    assert names[0] == "7.6 B, 16x1024, exact, float32; h200, 40 GiB host, disk"
    assert TINY.name == "tiny, 2x64, in the backward, 8-bit; h200, 1 GiB host, disk"
    assert NARROW.name == "tiny, 2x64, exact, float32; 3080 1 GiB, 12 GB/s, 1 GiB host"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--cases", "tiers", "--against", "exhaustive"], "--against is for --cases grid"),
        (["--compare", "/nowhere.md"], "/nowhere.md: No such file or directory"),
        (["--compare", __file__], "no table of `python -m benchmarks.plans --out`"),
        (["--cases", "tiers", "--only", "nothing"], "no case of tiers has it in its name"),
    ],
)
def test_bad_input(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plans.main(arguments)
    assert ended.value.code == 2 and error in capsys.readouterr().err
