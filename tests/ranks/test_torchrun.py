"""What ranks check by themselves (`tests.ranks.script`), next to the plain model in each of them;
one start of torchrun runs many checks, up to the first that fails. And one rank does something
else, or nothing: all ranks stop soon, and say which one and where. The times are bounds on hanging.
Who is to blame when: `tests/unit/test_agreement.py`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import processes, torchrun_loops
from tests.processes import python
from tests.ranks.faults import CASES
from tests.ranks.here import Values, differing
from tests.torchrun_loops import SAVED, STEPS, WORLD

TIMEOUT_S = 900  # of a machine that does much else
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("part", "ranks", "device"),
    [
        ("two", 2, "cpu"),
        pytest.param("more", 2, "cpu", marks=THOROUGH),
        pytest.param("loops", 2, "cpu", marks=THOROUGH),
        pytest.param("four", 4, "cpu", marks=THOROUGH),
        pytest.param("replicas", 4, "cpu", marks=THOROUGH),
        pytest.param("more replicas", 4, "cpu", marks=THOROUGH),
        pytest.param("three replicas", 6, "cpu", marks=THOROUGH),
        pytest.param("gpus", 2, "cuda", marks=pytest.mark.gpu(count=2)),
        pytest.param("replicas", 4, "cuda", marks=pytest.mark.gpu(count=4)),
    ],
)
def test_ranks(part: str, ranks: int, device: str, tmp_path: Path) -> None:
    processes.torchrun(
        "tests.ranks.script",
        *(part, str(tmp_path), device),
        ranks=ranks,
        timeout_s=TIMEOUT_S,
        device=device,
    )


BOUND_S = 60.0  # from the fault to the error, by default
HANG_S = 500


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_faults_stop_all_ranks(always: bool, tmp_path: Path) -> None:
    cases = [name for name, case in CASES.items() if case.always == always]
    python(
        *("-m", "tests.ranks.faults", str(tmp_path), *cases),
        timeout_s=HANG_S,
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    found: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "found.json").read_text())
    assert [*found] == cases
    for name, ranks in found.items():
        for rank, facts in enumerate(ranks):
            check(name, rank, facts, odd=rank == len(ranks) - 1)
    pids = [str(facts["pid"]) for ranks in found.values() for facts in ranks]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(pid in name.split("_") for pid in pids)]


def check(name: str, rank: int, facts: dict[str, Any], *, odd: bool) -> None:
    """The error of a rank is the right one, came soon, and nothing is left of its process."""
    case, where = CASES[name], f"{name}, rank {rank}: {facts}"
    if odd:
        assert facts["kind"] == case.odd, where
    elif facts["kind"] == "none":
        assert name == "is_killed_with_the_store", where
    elif name == "all_are_interrupted":
        assert facts["kind"] == "KeyboardInterrupt", where
    else:
        assert facts["kind"] == "RankError", where
        assert re.search(case.others.format(rank=rank), facts["error"]), where
    assert facts.get("seconds", 0) < BOUND_S, where
    assert facts["ending_s"] < BOUND_S, where
    assert not Path(f"/proc/{facts['pid']}").exists(), where


HEAD = "lm_head.weight"  # another name of the embedding
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=WORLD))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", torchrun_loops.LOOPS)
def test_they_train_as_without_and_resume_from_what_they_save(
    loop: str, device: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec("accelerate" if loop == "trainer" else loop) is None:
        pytest.skip(f"needs {loop}")
    processes.torchrun(
        "tests.torchrun_loops",
        *(loop, str(tmp_path), device),
        ranks=WORLD,
        timeout_s=TIMEOUT_S,
        device=device,
    )
    first, other = (torch.load(tmp_path / str(rank)) for rank in range(WORLD))
    for found in (first, other):
        for way in found.keys() - {"plain", "saves", "resumes"}:
            as_plain(way, found["plain"], found[way])
        resumes(found["saves"], found["resumes"])
    for way in first.keys() - {"plain", "saves", "resumes"}:
        mine, theirs = (without_buffers(each[way]["values"]) for each in (first, other))
        assert not differing(mine, theirs), f"{way}: ranks differ"
        assert first[way]["losses"] != other[way]["losses"] or loop == "trainer", "rows of its own"
    FILES[loop](tmp_path, first["saves"]["saved"], first["saves"]["values"])


def without_buffers(values: Values) -> Values:
    """Where no DistributedDataParallel sends them, or none has since, they are a rank's own."""
    return {name: value for name, value in values.items() if "running" not in name}


def as_plain(way: str, plain: Any, ours: Any) -> None:
    """Losses, parameters and buffers are the plain ones."""
    assert len(plain["losses"]) >= STEPS
    near = 0.0 if way == "ddp" else 1e-5
    assert ours["losses"] == pytest.approx(plain["losses"], rel=near, abs=0.0)
    a, b = ours["values"], plain["values"]
    if way == "model parallel":
        a, b = without_buffers(a), without_buffers(b)
    assert not differing(a, b, near)


def resumes(first: Any, again: Any) -> None:
    """It goes on as one that was never interrupted, in every bit."""
    assert not differing(first["values"], again["values"])
    assert len(first["states"]) == len(first["values"].keys() - {HEAD})
    for ours, theirs in zip(first["states"], again["states"], strict=True):
        assert ours.keys() == {"step", "exp_avg", "exp_avg_sq"} and not differing(ours, theirs)
    assert differing(first["saved"], first["values"]), "two steps lie between"


# The files hold all of each tensor, and a plain model loads them.


def pretrained(folder: Path) -> Values:
    """What `from_pretrained()` finds."""
    from transformers import Qwen2ForCausalLM

    model, said = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return dict(model.state_dict())


def whole_states(found: Any, values: Values) -> bool:
    """Has an optimizer's state dict all of each moment, as a plain optimizer loads it?"""
    moments = [state[key] for state in found["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    shapes = sorted(tuple(moment.shape) for moment in moments)
    expected = [tuple(value.shape) for name, value in values.items() if name != HEAD]
    return {type(moment) for moment in moments} == {Tensor} and shapes == sorted(2 * expected)


def of_trainer(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        assert not differing(pretrained(checkpoint), values)
        assert whole_states(torch.load(checkpoint / "optimizer.pt"), saved)
    assert not differing(pretrained(folder / "model"), last)


def of_accelerate(folder: Path, saved: Values, last: Values) -> None:
    from safetensors.torch import load_file

    for at, values in (("state", saved), ("model", last)):
        found = load_file(folder / at / "model.safetensors")
        assert differing(found, values) == [f"only in one: {HEAD}"]
    assert not differing(pretrained(folder / "pretrained"), last)
    assert whole_states(torch.load(folder / "state" / "optimizer.bin"), saved)


def of_lightning(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        found = torch.load(folder / "out" / f"step={step}.ckpt", weights_only=False)
        ours = {name.removeprefix("model."): v for name, v in found["state_dict"].items()}
        assert not differing(ours, values)
        assert whole_states(found["optimizer_states"][0], saved)


FILES = {"trainer": of_trainer, "accelerate": of_accelerate, "lightning": of_lightning}
