"""Ranks that share a model against one process that has all of their micro-batches.

Each start of torchrun costs seconds, so one start runs many cases, and a test names all that fail.
Losses, norms, parameters and states are compared relative to each tensor's norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile as package
from tests import processes, rank_checkpoints, rank_loops, rank_whole
from tests.rank_cases import FOUR, MODES_OF_FOUR, MORE, ROUGH, TWO
from tests.rank_modes import Mode, Record, differences, reference
from tests.rank_script import STATES

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 400
EXACT = 1e-11  # of float64


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks = torchrun("two", 2, tmp_path)
    failed = wrong_modes(TWO, ranks)
    again = differences(ranks[0]["exact, again"], ranks[0]["exact"], 0.0)
    assert not failed and not again, "\n".join([*failed, *again])
    first, second = ranks[0]["rounded"]
    assert first.unique().numel() > 1 and not first.equal(second)
    failed = wrong_values([each["refusals"]["values"] for each in ranks])
    assert not failed, "\n".join(failed)
    for said in (each["refusals"] for each in ranks):
        refused = said["other options"]
        for name, there in ("state_dtype", "int8"), ("lookahead", "3"):
            assert f"OptionError: megacompile(): option {name!r} is " in refused[name]
            assert f" in rank 0 and {there} in rank 1; ranks that share a model" in refused[name]
        assert "'lowering' is eager in rank 0 and inductor in rank 1" in refused["lowering"]
        assert not said["other progress"] and not said["other budgets"], "each rank has its own"
        for other in ("another shape", "frozen in one"):
            assert "ModelError: megacompile(): Linear is another model in rank 1" in said[other]
        assert said["is as it was"]
        assert (
            "Linear is another model in rank 1 than in rank 0: buffer 'late' (3,) torch.float32, "
            "where rank 0 has nothing more; needed the same" in said["a buffer in one"]
        )
        assert "buffer '1.running_mean' (5,) torch.float32, where" in said["another buffer"]
        assert not said["goes on"], "what all know is no reason to stop"
        assert "OptionError: megacompile(): got a mesh of 2 x 1 ranks" in said["only replicas"]
        assert said["collectives"] == {"clip_grad_norm_": 1, "step": 0}
    budgets, residents = zip(*(each["refusals"]["least memory"] for each in ranks), strict=True)
    assert budgets == (250 * 2**10, 250 * 2**10)
    assert residents[0] == residents[1] and 0 < len(residents[0]) < 6
    raised = [each["refusals"]["raises in one"] for each in ranks]
    why = "rank 1 raised ValueError: bad memory, in megacompile() of Linear"
    assert raised[0].startswith(f"RankError: {why}; all ranks stop there; fix the error")
    assert raised[1] == "ValueError: bad memory"
    assert "rank 1 is not in the mesh" in ranks[1]["refusals"]["not in the mesh"]


@pytest.mark.thorough
def test_loops_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    failed = wrong_loops(torchrun("loops", 2, tmp_path))
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_four_ranks_and_what_two_and_one_load_of_them(tmp_path: Path) -> None:
    four = torchrun("four", 4, tmp_path)
    failed = wrong_modes(FOUR, four)
    failed += wrong_plain("2 x 2", [each["2 x 2, plain again"] for each in four])
    failed += wrong_save(four[0]["2 x 2, saved"], tmp_path)
    failed += wrong_values([each["2 x 2, values"] for each in four])
    a, b, of_a, of_b = four[0]["2 x 2, rounded"]  # the last two replicate the first two
    assert a.equal(of_a) and b.equal(of_b) and not a.equal(b)
    two = torchrun("load", 2, tmp_path)
    for states in STATES:
        saved = four[0][f"save, {states}"]
        for name in ("load", "load_full", "load_plainly"):
            failed += wrong_checkpoint(f"two: {name}, {states}", two[0], saved)
        for load in (rank_checkpoints.load, rank_checkpoints.load_full):
            name = f"{load.__name__}, {states}"
            plain = {name: load(None, 1, tmp_path / states)}
            failed += wrong_checkpoint(f"plain: {name}", plain, saved)
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_four_ranks_with_8_bits_a_disk_adapters_and_frozen_layers(tmp_path: Path) -> None:
    failed = wrong_modes(MODES_OF_FOUR, torchrun("modes of four", 4, tmp_path))
    assert not failed, "\n".join(failed)


def test_ranks_save_and_are_plain_again(tmp_path: Path) -> None:
    ranks = torchrun("whole", 2, tmp_path)
    failed = wrong_save(ranks[0]["saved"], tmp_path)
    for name in rank_whole.MADE:
        failed += wrong_plain(name, [each[name] for each in ranks])
    assert not failed, "\n".join(failed)
    assert ranks[0]["saved"]["gathered"] == 6 and not ranks[0]["saved"]["alive"]
    for rank, said in enumerate(each["failing"] for each in ranks):
        first, last = ("", "rank 1: ") if rank == 0 else ("rank 0: ", "")
        assert re.match(f"CheckpointError: {first}save.*/file cannot be written", said["a file"])
        assert re.match(f"CheckpointError: {first}save.*No space left", said["a full disk"])
        assert said["left"] == "[]" and said["in the end"] == "['model.safetensors']"
        assert said["a size"].startswith(f"OptionError: {last}save(): got max_shard_size=0")
        assert f"ModelError: {last}unmegacompile(): parameter Tied.layers.1" in said["a hook"]
    first, last = (each["heard"] for each in ranks)
    assert "compile() does nothing" in first["warned"][0] and len(first["warned"]) == 2
    assert [first["warned"][1], *last["warned"]] == ["rank 0: its memory", "rank 1: its memory"]
    assert "megacompile: capturing the model ..." in first["shown"] and not last["shown"]
    for rank, one in enumerate(each["by one"] for each in ranks):
        assert not differing(one["saved"], one["expected"]) and one["tied"]
        for kind, values in one["on"].items():
            assert not differing(one["resumed"][kind], values), (rank, kind)
        assert "DTensor" in str(one["is shared again"])
        what = "in saving Tied in one rank; all ranks stop there"
        assert ("RuntimeError: Parent directory" if rank == 0 else what) in one["told"]
        assert "in one rank: it needs " in one["memory"] and "0.977 KiB are free" in one["memory"]
    for said in (each["refused"] for each in ranks):
        assert "AdamW has a state 'mine' of shape (3, 71) for parameter" in said["states"]
        assert "more of host memory in each rank for whole parameters" in said["memory"]
        assert "are free for each of the 2 ranks of this host" in said["memory"]


@pytest.mark.thorough
def test_two_ranks_in_every_mode(tmp_path: Path) -> None:
    failed = wrong_modes(MORE, torchrun("more", 2, tmp_path))
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_compiled_loops_of_two_ranks(tmp_path: Path) -> None:
    failed = wrong_loops(torchrun("compiled", 2, tmp_path))
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_one_rank_loads_what_two_have(tmp_path: Path) -> None:
    torchrun("save", 2, tmp_path)
    one = torchrun("load", 1, tmp_path)
    failed = []
    for states in STATES:
        saved = torch.load(tmp_path / "save.0")[f"save, {states}"]
        for name in ("load", "load_full"):
            failed += wrong_checkpoint(f"one: {name}, {states}", one[0], saved)
    assert not failed, "\n".join(failed)


def wrong_modes(
    modes: Mapping[str, Mode], ranks: list[dict[str, Record]], device: str = "cpu"
) -> list[str]:
    """What differs between ranks and one process, and between ranks."""
    failed = []
    for name, mode in modes.items():
        ours = ranks[0][name]
        found = differences(ours, reference(mode, len(ranks), device=device), mode.tolerance)
        for rank, other in enumerate(ranks):
            found += [f"rank {rank}: {each}" for each in differences(other[name], ours, 0.0)]
        failed += [f"{name}: {each}" for each in found]
    return failed


def wrong_loops(ranks: list[dict[str, Record]]) -> list[str]:
    """The same of loops."""
    failed = []
    for name in rank_loops.LOOPS:
        plain = rank_loops.run(name, None, len(ranks))
        failed += [f"{name}: {each}" for each in differences(ranks[0][name], plain, EXACT)]
    return failed


def wrong_values(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> list[str]:
    """What is not the first rank's, of models that ranks drew apart."""
    return [
        f"rank {rank}: {kind} {name}"
        for rank, said in enumerate(ranks)
        for kind in ("found", "loaded")
        for name, value in said["expected"].items()
        if not bits(value).equal(bits(said[kind][name]))
    ]


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of tensors that are not equal in every bit."""
    names = sorted(found.keys() ^ expected.keys())
    return names or [name for name, value in expected.items() if not value.equal(found[name])]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is equal to itself."""
    return tensor.reshape(-1).view(torch.uint8)


def wrong_save(saved: dict[str, Any], folder: Path) -> list[str]:
    """What differs from what one process saves of the same values."""
    alone = rank_whole.net()
    alone.load_state_dict(saved["tensors"])
    sizes: dict[str, Any] = {"several": {"max_shard_size": rank_whole.SHARD}, "one": {}, "part": {}}
    wrong = [] if saved["there"] == ["model.safetensors"] else [f"there: {saved['there']}"]
    for name, options in sizes.items():
        ours, theirs = folder / name, folder / f"{name}, alone"
        package.save(alone.layers[1] if name == "part" else alone, theirs, **options)
        files = [{file.name: file.read_bytes() for file in at.iterdir()} for at in (ours, theirs)]
        wrong += [] if files[0] == files[1] else [f"save, {name}: other files"]
    several = sorted((folder / "several").glob("*-of-*"))
    return wrong + ([] if len(several) > 1 else [f"files: {several}"])


def wrong_plain(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    """What changes in a model that is not shared any more, or goes on in another way than a plain
    one, or is not the same in all ranks."""
    failed = []
    for number, rank in enumerate(ranks):
        pairs = [(rank["now"], rank["shared"]), (rank["plain"], rank["expected"])]
        pairs += [(rank["plain"], ranks[0]["plain"]), (rank["again"], ranks[0]["again"])]
        for k, (ours, theirs) in enumerate(pairs):
            for kind in theirs:
                different = ours[kind].keys() ^ theirs[kind].keys() or [
                    each
                    for each, value in theirs[kind].items()
                    if not value.equal(ours[kind][each])
                ]
                failed += [f"{name}, rank {number}, {k}: {kind} {each}" for each in different]
    return failed


def wrong_checkpoint(title: str, found: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """What is not as it was saved, bit by bit, or does not go on as the run that saved it."""
    name = title.partition(": ")[2]
    ours, narrow = found[name], "8 bits" in title
    near = ROUGH if narrow else EXACT
    bitwise = 0.0 if "plainly" not in name else near  # that run was not the one that was saved
    wrong = differences(ours["loaded"], saved["saved"], bitwise)
    wrong += differences(ours["trained"], saved["trained"], near)
    return [f"{title}: {each}" for each in wrong]


def torchrun(part: str, ranks: int, folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """What each rank found of a part of `rank_script`."""
    arguments = part, str(folder), device
    processes.torchrun(
        "tests.rank_script", *arguments, ranks=ranks, timeout_s=TIMEOUT_S, device=device
    )
    return [torch.load(folder / f"{part}.{rank}") for rank in range(ranks)]
