"""`python -m megacompile plan`, called in this process: figures, what fits, and the changes that
would fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megacompile import HostMemoryError, megacompile
from megacompile.cli import main
from tests.configs import CONFIG, EXPERTS, Words, frozen

SMALL = ("--batch", "2", "--seq", "16", "--gpu", "4090")
WORDS, FROZEN, LONG, TOWER = (
    f"tests.configs:{name}" for name in ("Words", "frozen", "long", "tower")
)
KIB, MIB = 2**10, 2**20


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["plan", *argv]) == code
    return capsys.readouterr().out


def config(folder: Path, **changes: Any) -> str:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_the_figures_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model of transformers with experts, of which a token passes a part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = config(tmp_path, **EXPERTS, max_position_embeddings=16)  # --seq is all of it
    given = {**CONFIG, **EXPERTS}
    kind = given.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = numel(model) - experts * 6 // 8
    found = answer(capsys, folder, *SMALL, "--gpu-memory", "8MiB", "--host-memory", "1GiB")
    plan = found["plan"]
    assert plan["parameters"] == numel(model) and found["active_parameters"] == active
    assert found["fits"] and plan["device"]["needed_bytes"] <= 8 * MIB
    assert (plan["device"]["available_bytes"], plan["host"]["available_bytes"]) == (8 * MIB, 2**30)
    states = (plan[where]["kinds"].get("optimizer states", 0) for where in ("device", "host"))
    assert 8 * numel(model) <= sum(states) <= 8.1 * numel(model)
    assert found["tokens_a_step"] == 32
    assert found["tokens_per_s"] == pytest.approx(32 / found["step_s"])
    assert found["tflop_s"] == pytest.approx(6 * active * found["tokens_per_s"] / 1e12)
    out = printed(capsys, folder, *SMALL, "--changes")
    total, of_token = (f"{count / 1000:.3g} K" for count in (numel(model), active))
    for words in ("MixtralForCausalLM", "RTX 4090", "2 x 16 tokens", "TFLOP/s by 6NT",
                  "what would help", "8-bit optimizer states", "with --gpu this",
                  f"{total} parameters ({of_token} active a token)"):  # fmt: skip
        assert words in out, words
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_experts_take_the_time_of_those_that_are_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer of them is no faster than a dense one of its active width."""
    argv = ("--batch", "64", "--seq", "512", "--dtype", "float32", "--host-memory", "1TiB")
    wide = {"hidden_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 512}
    experts = config(tmp_path, **wide, **EXPERTS, intermediate_size=448)
    step_s = answer(capsys, experts, *argv)["step_s"]
    dense_s = answer(capsys, config(tmp_path, **wide, intermediate_size=896), *argv)["step_s"]
    assert dense_s < step_s < 1.5 * dense_s, (dense_s, step_s)


def test_a_dtype_is_that_of_all_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Of norms and biases too."""
    assert "float32" in printed(capsys, TOWER, *SMALL).splitlines()[0]
    first = printed(capsys, TOWER, *SMALL, "--dtype", "bfloat16").splitlines()[0]
    assert "bfloat16" in first and "float32" not in first


TIGHT = ("--gpu-memory", "720KiB")  # most buckets are streamed


def test_less_memory_is_slower_until_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that lacks less than a tenth of the device's memory is tried anyway."""
    more = answer(capsys, WORDS, *SMALL, "--gpu-memory", "64MiB")
    less = answer(capsys, WORDS, *SMALL, *TIGHT)
    assert more["fits"] and less["fits"] and more["step_s"] < less["step_s"]
    assert more["plan"]["host"]["needed_bytes"] < less["plan"]["host"]["needed_bytes"]
    refused = answer(capsys, TOWER, *SMALL, "--gpu-memory", "1KiB", code=1)
    assert refused["why_not"][0].startswith("device memory: ") and not refused["tried"]
    needed = refused["plan"]["device"]["needed_bytes"]
    assert refused["plan"]["device"]["fits"] is False
    for there in (needed * 95 // 100, needed * 85 // 100):
        found = answer(capsys, TOWER, *SMALL, "--gpu-memory", f"{there}B", code=1)
        assert found["tried"] == (there * 1.1 >= found["plan"]["device"]["needed_bytes"])
        assert found["tried"] == (there > needed * 0.9)
        assert any("tried anyway" in r for r in found["plan"]["reasons"]) == found["tried"]
        assert any("more of device memory" in line for line in found["why_not"])


def test_what_the_host_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """It lives on the device; where that is full too, the answer says what would do."""
    found = answer(capsys, WORDS, *SMALL, "--gpu-memory", "8MiB", "--host-memory", "1000KiB")
    assert found["fits"] and found["plan"]["host"]["needed_bytes"] <= 1000 * KIB
    assert found["plan"]["device"]["kinds"]["optimizer states"] > 1000 * KIB
    why = answer(capsys, WORDS, *SMALL, *TIGHT, "--host-memory", "500KiB", code=1)
    assert why["why_not"][0] == "host memory is too small", "parameters are too many at first"
    needed = why["plan"]["host"]["needed_bytes"]  # by gradients and states behind that
    (more,) = (line for line in why["why_not"] if " more of host memory" in line)
    assert needed > 2 * MIB and f"{(needed - 500 * KIB) / MIB:.3g} MiB" in more


def test_parameters_pass_through_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """A frozen base fits on the device, and gets there by way of the host. `megacompile()` says the
    same; so much more is enough, to a kibibyte, and a disk is."""
    host = (FROZEN, *SMALL, "--host-memory")
    found = answer(capsys, *host, "500KiB", code=1)
    assert found["plan"]["host"]["fits"] and found["plan"]["device"]["fits"] and not found["tried"]
    with pytest.raises(HostMemoryError) as error:
        megacompile(frozen().to("meta"), device="cpu", host_memory="500KiB", gpu_memory="1GiB")
    words, why = str(error.value).splitlines(), found["why_not"]
    assert words[:3] == [f"megacompile(): {why[0]}", *why[1:3]]
    assert words[-1] == why[-2] and why[-1].startswith("with ")
    sizes = [4 * p.numel() for p in frozen().parameters()]
    least = -(-(sum(sizes) + max(sizes)) // KIB)
    assert answer(capsys, *host, f"{least}KiB")["fits"]
    assert not answer(capsys, *host, f"{least - 1}KiB", code=1)["fits"]
    disk = ("--disk", "/absent", "--disk-rates", "1/1", "--disk-memory", "16MiB")
    assert answer(capsys, *host, "500KiB", *disk)["fits"]
    assert answer(capsys, *host, "500KiB", *disk, "--disk-weights")["fits"]


def test_options_of_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes of the states, wherever they are."""

    def states(*options: str) -> dict[str, int]:
        plan = answer(capsys, WORDS, *SMALL, "--update-in-backward", *options)["plan"]
        kinds: dict[str, int] = dict(plan["host"]["kinds"])
        for kind, size in plan["device"]["kinds"].items():
            kinds[kind] = kinds.get(kind, 0) + size
        return kinds

    size = numel(Words())
    bf16 = ("--dtype", "bfloat16")
    for options, bytes_each in (((), 8), (("--state-dtype", "same", *bf16), 4),
                                (("--optimizer", "momentum"), 4)):  # fmt: skip
        assert states(*options)["optimizer states"] == pytest.approx(bytes_each * size, rel=0.02)
    assert "optimizer states" not in states("--optimizer", "sgd")
    in_8_bits = states("--state-dtype", "int8")["optimizer states"]
    assert 2 * size * (1 + 4 / 256) <= in_8_bits < 2.5 * size  # small ones have float32 states
    masters = states("--compute-dtype", "bfloat16")
    assert masters["parameters"] + masters.get("masters", 0) >= 4 * size


def test_ranks_choose_no_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    """It fits in tiles alone; those decide what a backward reads, which all ranks would have to."""
    argv = (TOWER, "--batch", "8", "--seq", "64", "--gpu-memory", "150KiB", "--json")
    for gpus, fits in (("1", True), ("2", False)):
        main(["plan", *argv, "--gpus", gpus])
        assert json.loads(capsys.readouterr().out)["fits"] is fits


def test_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--batch", "4", "--seq", "64", "--gpu-memory", "150KiB", "--tiles", "2")
    out = printed(capsys, TOWER, *argv)
    assert "kept, 2 tiles" in out and "4 x 64 tokens a step" in out


def test_a_machine_with_one_memory_copies_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    one = (WORDS, "--batch", "2", "--seq", "16", "--gpu", "gb10")
    plan = answer(capsys, *one, "--changes")["plan"]
    assert (plan["host"]["needed_bytes"], plan["hardware"]) == (0, "NVIDIA GB10")
    changes = {change["name"] for change in plan["changes"]}
    assert "twice the device memory" in changes and "twice the host memory" not in changes
    assert {s["stream"]: s["predicted_s"] for s in plan["streams"]}["h2d"] == 0
    small = answer(capsys, *one, "--host-memory", "1MiB", code=1)
    assert small["why_not"][0].startswith("memory: ") and not small["tried"]


def test_a_slower_link_makes_a_step_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks exchange over it, unless another interconnect is given."""
    fast, slow = (answer(capsys, WORDS, *SMALL, *TIGHT, "--link", x)["plan"] for x in ("1", "0.1"))
    assert fast["step_s"] < slow["step_s"]
    assert next(iter(slow["bounds"])) in ("h2d", "d2h")
    copies = {stream["stream"]: stream["predicted_s"] for stream in slow["streams"]}
    assert copies["h2d"] >= 0.8 * 4 * numel(Words()) / 0.1e9
    ranks = (WORDS, *SMALL, "--gpus", "2", "--gpu-memory", "900KiB", "--link", "1")
    one, other = (answer(capsys, *ranks, *x)["plan"] for x in ((), ("--interconnect", "0.01")))
    assert one["step_s"] < other["step_s"]


def test_page_locked_memory_is_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Needed, available, and the price of what stays pageable."""
    argv = (WORDS, *SMALL, *TIGHT, "--host-memory", "64MiB", "--link", "0.01", "--page-locked")
    short, none, enough = (answer(capsys, *argv, size)["plan"] for size in ("1MiB", "0", "0.9"))
    needed = short["host"]["needed_bytes"]
    assert needed > 2 * MIB and short["page_locked"]["needed_bytes"] == needed
    assert short["page_locked"]["available_bytes"] == MIB and short["page_locked"]["fits"] is False
    assert enough["step_s"] < short["step_s"] < none["step_s"]
    assert short["pageable_s"] == pytest.approx(short["step_s"] - enough["step_s"])
    assert enough["page_locked"]["fits"] is True and enough["pageable_s"] == 0.0
    small = answer(capsys, WORDS, *SMALL, *TIGHT, "--host-memory", "1590KiB", "--changes", code=1)
    sizes = {change["name"]: change["host_bytes"] for change in small["plan"]["changes"]}
    assert 0 < sizes["twice the host memory"] <= 2 * 1590 * 1024, "of a plan that fits it"


LESS = ("--gpu-memory", "1600KiB")
DISK = ("--disk", "/absent/scratch", "--disk-rates", "0.1/0.1", "--update-in-backward")


def test_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the host is too small, and the answer says that one would do. Ranks of one host
    have a part of it each."""
    argv = (LONG, *SMALL, *LESS, "--host-memory", "3MiB", "--update-in-backward")
    without = answer(capsys, *argv, code=1)
    assert any(line.startswith("with disk= it would fit: ") for line in without["why_not"])
    there = (*argv, *DISK[:4], "--disk-memory", "1GiB")
    found = answer(capsys, *there)["plan"]
    needed = found["disk"]["needed_bytes"]
    assert 0 < needed <= found["disk"]["available_bytes"] == 2**30 and found["disk"]["fits"]
    assert found["host"]["needed_bytes"] <= found["host"]["available_bytes"] == 3 * MIB
    assert any(stream["stream"] == "read" for stream in found["streams"])
    ranks = answer(capsys, *there, "--gpus", "2")
    assert ranks["plan"]["disk"]["available_bytes"] == 2**29


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.json"], "'nowhere.json'"),
        (["gpt.py"], "package.module:function (gpt:build for a function of gpt.py that returns"),
        (["Qwen/Qwen2.5-7B"], "nothing is downloaded: for a name on a hub, pass its config.json"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["tests.configs:nothing"], "got int; needed a torch.nn.Module"),
        (["tests.configs:broken"], "ValueError: no such"),
        (["tests.configs:breaking"], "cannot be captured"),
        (["tests.configs:recurrent"], "megacompile plan: Sequential cannot be captured: "),
        (["tests.configs:absent"], "no attribute 'absent'"),
        (["CONFIG", "--gpu", "tpu"], "argument --gpu: invalid choice: 'tpu' (choose from"),
        ([TOWER, "--gpu-memory", "24"], "--gpu-memory: 24: needed a unit"),
        ([TOWER, "--host-memory", "0.5"], "a fraction of an unknown size"),
        ([TOWER, "--batch", "0"], "--batch: invalid positive value"),
        (["CONFIG", "--seq", "128"], "max_position_embeddings 64"),
        (["EMPTY"], "model_type"),
        (["TEXT"], "is no JSON with a model_type"),
        (["UNKNOWN"], "'qwen33'; nearest: qwen3, "),
        (["FOLDER"], "no such file"),
        ([TOWER, "--gpu=gb10", "--link=9", "--gpus=2"], "--gpus, --link: NVIDIA GB10 has one"),
        ([TOWER, "--gpu=gb10", "--host-memory=0GiB"], "--host-memory: got 0; needed a positive"),
        ([TOWER, "--link=nan"], "needed a positive number"),
        ([TOWER, "--link=25GB"], "--link: invalid float value: '25GB'"),
        ([TOWER, "--page-locked=1.5"], "--page-locked: 1.5: "),
        ([TOWER, "--disk-memory", "1GiB"], "disk_memory=1073741824 without disk="),
        ([TOWER, *DISK[:4]], "no such folder"),
        ([TOWER, *DISK[:2], "--disk-memory", "1GiB", "--disk-rates", "2/-1"], "a positive number"),
        ([TOWER, *DISK[:2], "--disk-rates", "2"], "--disk-rates: invalid rates value: '2'"),
        ([TOWER, "DISK", "--disk-weights", "--compute-dtype", "bfloat16"], "masters"),
        ([TOWER, "DISK", "--disk-weights", "--gpus", "2"], "shards of parameters"),
        ([TOWER, "--disk", "THERE"], "hardware --disk"),
        ([], "the following arguments are required: TARGET"),
        (["COMMAND", "demo", "--steps", "2"], "needed 3 or more"),
        (["COMMAND", "demo", "--steps", "0"], "--steps: invalid positive value: '0'"),
        (["COMMAND", "demo", "--device", "tpu"], "device='tpu'"),
        (["COMMAND", "hardware", "--disk", "/absent/folder"], "/absent/folder"),
        (["COMMAND"], "the following arguments are required: COMMAND"),
        (["COMMAND", "nothing"], "argument COMMAND: invalid choice: 'nothing'"),
    ],
)
def test_errors_are_one_line_and_code_2(
    argv: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nobody has measured a disk
    names = {"THERE": [str(tmp_path)], "DISK": [*DISK[:4], "--disk-memory", "1GiB"]}
    texts = {"CONFIG": json.dumps(CONFIG), "EMPTY": "{}", "TEXT": "hello"}
    for name, text in {**texts, "UNKNOWN": '{"model_type": "qwen33"}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
        names[name] = [str(tmp_path / f"{name}.json")]
    (tmp_path / "weights").mkdir()
    names["FOLDER"] = [str(tmp_path / "weights")]
    if names.keys() & {*argv} & {*texts, "UNKNOWN"}:
        pytest.importorskip("transformers")
    rest = argv[1:] if argv[:1] == ["COMMAND"] else ["plan", *argv]
    try:
        code = main([part for arg in rest for part in names.get(arg, [arg])])
    except SystemExit as end:  # argparse's
        code = end.code  # type: ignore[assignment]
    assert code == 2
    error = capsys.readouterr().err
    command = " ".join(["megacompile", *({*rest[:1]} - {"nothing"})])
    assert error.startswith(f"{command}: ") and words in error and error.count("\n") == 1


def test_without_the_package_that_a_config_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", folder]) == 2
    assert "pip install transformers; package.module:function " in capsys.readouterr().err
