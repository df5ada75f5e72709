"""`python -m megacompile plan`: its figures against the model's, what fits, and how it fails."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.cli import main, plan, run_plan, source, target
from megacompile.cli.run_plan import _long
from megacompile.cost.hardware import H200
from megacompile.options import Activations
from megacompile.plan import planner, searches
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import Problem
from tests.configs import CONFIG

pytest.importorskip("transformers")

SMALL = ("--batch", "2", "--seq", "16")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_figures_are_those_of_the_model(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, config, *SMALL, "--gpu-memory", "4MiB", "--host-memory", "1GiB")
    numel = target.build(config, batch=2, seq=16, dtype=None).parameters
    plan = found["plan"]
    assert plan["parameters"] == numel
    assert found["fits"] and plan["device"]["needed_bytes"] <= 4 * 2**20
    assert plan["device"]["there_bytes"] == 4 * 2**20
    assert plan["host"]["there_bytes"] == 2**30
    held = {k: plan["device"]["kinds"].get(k, 0) + plan["host"]["kinds"].get(k, 0) for k in STATES}
    assert about(held["optimizer states"], 8 * numel)
    assert found["tokens_a_step"] == 32
    assert found["tokens_per_s"] == pytest.approx(32 / found["step_s"])
    assert found["tflop_s"] == pytest.approx(6 * numel * found["tokens_per_s"] / 1e12)
    assert found["tokens_take_s"] == pytest.approx(1e12 / found["tokens_per_s"])


STATES = ("optimizer states",)


def test_it_prints_what_is_asked_for(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(Path(config).parent), *SMALL, "--gpu", "4090", "--tokens", "3e9"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Qwen2ForCausalLM",
        "RTX 4090",
        "2 x 16 tokens a step, adamw, float32 states",
        "it fits on the device; the host needs",
        "tokens/s",
        "TFLOP/s by 6NT",
        "3e9 tokens take",
        "the plan",
        "gives its loss and no logits",
    ):
        assert words in out.replace("3e+09", "3e9").replace("3e09", "3e9"), words
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_of_experts_a_token_passes_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **experts}))
    made = target.build(str(tmp_path), batch=2, seq=16, dtype=None)
    held = {n: p.numel() for n, p in made.model.named_parameters() if ".experts." in n}
    active = made.parameters - sum(held.values()) * 6 // 8
    found = answer(capsys, str(tmp_path), *SMALL)
    assert found["active_parameters"] == active
    assert found["tflop_s"] == pytest.approx(6 * active * found["tokens_per_s"] / 1e12)
    assert f"({active / 1e9:,.3g} B active a token)" in _printed(capsys, str(tmp_path), *SMALL)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket lives on the device, though all of them would fit."""

    def streamed_search(problem: Problem, **options: Any) -> SearchResult | None:
        return planner.search(problem, **{**options, "resident": False})

    monkeypatch.setattr(searches, "search", streamed_search)


def about(size: int, wanted: float) -> bool:
    """As much, and the gaps between what is aligned."""
    return wanted <= size <= 1.01 * wanted


@pytest.mark.thorough
@pytest.mark.usefixtures("streamed")
def test_options_of_the_optimizer(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def host(*options: str) -> dict[str, int]:
        argv = (config, *SMALL, "--gpu-memory", "16MiB", *options, "--update-in-backward")
        kinds: dict[str, int] = answer(capsys, *argv)["plan"]["host"]["kinds"]
        return kinds

    numel = target.build(config, batch=2, seq=16, dtype=None).parameters
    exact = host()
    assert about(exact["optimizer states"], 8 * numel) and "gradients" not in exact
    in_8_bits = host("--state-dtype", "int8")["optimizer states"]
    assert 2 * numel * (1 + 4 / 256) <= in_8_bits < 2.5 * numel  # small ones have float32 states
    assert about(host("--state-dtype", "same")["optimizer states"], 4 * numel)
    assert about(host("--optimizer", "momentum")["optimizer states"], 4 * numel)
    assert "optimizer states" not in host("--optimizer", "sgd")
    masters = host("--dtype", "float32", "--compute-dtype", "bfloat16")
    assert about(masters["masters"], 4 * numel) and masters["parameters"] < 2.1 * numel


@pytest.mark.usefixtures("streamed")
def test_what_does_not_fit_is_said_with_the_table(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", config, *SMALL, "--gpu-memory", "1MiB", "--host-memory", "700KiB"]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "it does NOT fit: host memory: " in out and "700 KiB available" in out
    assert "with 8-bit optimizer states it would" in out
    assert " more of host memory it would fit" in out
    assert "needed" in out and "if it did fit" in out
    found = answer(capsys, config, *SMALL, "--gpu-memory", "64KiB", code=1)
    assert found["why_not"][0].startswith("device memory: ")
    assert found["plan"]["device"]["fits"] is False
    assert found["plan"]["device"]["needed_bytes"] > 2**16
    assert "this is the plan that comes nearest" in found["plan"]["reasons"]


def test_what_lacks_little_of_the_device_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """As `megacompile()` does."""
    small = ("tests.test_cli_plan:tower", *SMALL)
    refused = answer(capsys, *small, "--gpu-memory", "1KiB", code=1)
    needed = refused["plan"]["device"]["needed_bytes"]
    assert not refused["tried"] and "tried" not in refused["why_not"][0]
    for there in (needed * 95 // 100, needed * 85 // 100):
        found = answer(capsys, *small, "--gpu-memory", f"{there}B", code=1)
        first, *others = found["why_not"]
        assert found["tried"] == (there * 1.1 >= found["plan"]["device"]["needed_bytes"])
        assert (
            ("available: tried nevertheless" in first) == found["tried"] == (there > needed * 0.9)
        )
        assert others[0].endswith(" more of device memory it would fit")
        assert any("tried nevertheless" in r for r in found["plan"]["reasons"]) == found["tried"]
    assert main(["plan", *small, "--gpu-memory", f"{needed * 95 // 100}B"]) == 1
    assert "it may not fit: device memory: " in capsys.readouterr().out


def test_what_the_host_does_not_hold_lives_on_the_device(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, config, *SMALL, "--gpu-memory", "2MiB", "--host-memory", "340KiB")
    assert found["fits"] and found["plan"]["host"]["needed_bytes"] <= 340 * 2**10
    assert found["plan"]["device"]["kinds"]["optimizer states"] > 340 * 2**10


def test_more_memory_is_used_and_helps(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    less = answer(capsys, config, *SMALL, "--gpu-memory", "1.5MiB")
    more = answer(capsys, config, *SMALL, "--gpu-memory", "64MiB")
    assert more["step_s"] < less["step_s"]
    assert more["plan"]["host"]["needed_bytes"] < less["plan"]["host"]["needed_bytes"]


def test_sweep_finds_the_best_batch(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = dict[int, Any]()  # each batch takes seconds: one sweep, printed in two ways
    plan_one = run_plan._answer

    def once(args: Any, hardware: Any, batch: int) -> Any:
        if batch not in planned:
            planned[batch] = plan_one(args, hardware, batch)
        return planned[batch]

    monkeypatch.setattr(run_plan, "_answer", once)
    found = answer(capsys, config, "--seq", "64", "--sweep", "batch", "--gpu-memory", "4MiB")
    batches = [each["batch"] for each in found["sweep"]]
    assert batches == [2**k for k in range(len(batches))] and len(batches) > 2
    fitting = [each for each in found["sweep"] if each["fits"]]
    assert found["tokens_per_s"] == max(each["tokens_per_s"] for each in fitting)
    assert not found["sweep"][-1]["fits"] or len(fitting) == len(batches)
    assert main(["plan", config, "--seq", "64", "--sweep", "batch", "--gpu-memory", "4MiB"]) == 0
    out = capsys.readouterr().out
    assert f"{found['batch']} x 64 tokens a step" in out
    assert "tokens/s" in out.splitlines()[-len(batches) - 1]


def test_changes_are_tried_when_asked_for(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, *SMALL, "--gpu-memory", "4MiB", "--changes"]) == 0
    out = capsys.readouterr().out
    assert "what would help" in out and "8-bit optimizer states" in out


def tower(batch: int, seq: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return model, (torch.empty(batch * seq, 16),)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(tokens).square().mean()
        return result


def fixed() -> tuple[nn.Module, list[torch.Tensor], dict[str, Any]]:
    return nn.Linear(16, 16), [torch.empty(4, 16)], {}


def nothing() -> int:
    return 3


def broken() -> nn.Module:
    raise ValueError("no such\nthing")


def breaking() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Linear(16, 16), (torch.empty(4, 15),)


@pytest.mark.parametrize(("name", "tokens"), [("tower", 32), ("Words", 32), ("fixed", None)])
def test_functions(name: str, tokens: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, f"tests.test_cli_plan:{name}", *SMALL)
    assert found["tokens_a_step"] == tokens
    assert (found["tokens_per_s"] is None) == (tokens is None)
    assert "float32" in _printed(capsys, f"tests.test_cli_plan:{name}", *SMALL)


def _printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.json"], "there is no file 'nowhere.json'"),
        (["nowhere"], "no package.module:function"),
        (["no_such_module:f"], "cannot import no_such_module"),
        (["tests.test_cli_plan:missing"], "has no function 'missing'"),
        (["tests.test_cli_plan:nothing"], "got int; needed a torch.nn.Module"),
        (["tests.test_cli_plan:broken"], "ValueError: no such"),
        (["tests.test_cli_plan:breaking"], "cannot be captured"),
        (["tests.test_cli_plan:fixed", "--sweep", "batch"], "takes no arguments batch and seq"),
        (["CONFIG", "--gpu", "tpu"], "--gpu tpu: needed one of h200, h100"),
        (["CONFIG", "--float8", "rowwise", "--gpu", "a100"], "rowwise: the NVIDIA A100"),
        (["tests.test_cli_plan:tower", "--float8", "rowwise"], "a function converts the model"),
        (["CONFIG", "--gpu-memory", "24"], "--gpu-memory 24: needed a size such as 20GiB"),
        (["CONFIG", "--host-memory", "1.5"], "--host-memory 1.5: needed a size such as 20GiB"),
        (["CONFIG", "--gpu-memory", "much"], "--gpu-memory much: needed a size"),
        (["CONFIG", "--host-memory", "0.5"], "of what? give a size"),
        (["CONFIG", "--batch", "0"], "--batch 0: needed 1 or more"),
        (["CONFIG", "--seq", "128"], "the config has max_position_embeddings 64"),
        (["EMPTY"], "has no model_type"),
        (["TEXT"], "is no JSON"),
        (["UNKNOWN"], "has no model_type 'qwen33'; nearest: qwen3, "),
        (["model.Q4_K_M.gguf"], "is a GGUF file: quantized weights for inference; needed the conf"),
        (["model.safetensors"], "is a file of weights; needed the config"),
        (["FOLDER"], "config.json' (the folder has .gguf files, which are weights alone)"),
    ],
)
def test_errors_are_one_line_and_code_2(
    argv: list[str],
    words: str,
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"EMPTY": "{}", "TEXT": "hello", "UNKNOWN": '{"model_type": "qwen33"}'}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    names = {"CONFIG": config, **{name: str(tmp_path / f"{name}.json") for name in files}}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.gguf").touch()
    names["FOLDER"] = str(tmp_path / "weights")
    assert main(["plan", *(names.get(arg, arg) for arg in argv)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_three_model_types_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert main(["plan", str(tmp_path)]) == 2
    nearest = capsys.readouterr().err.strip().partition("nearest: ")[2].split(", ")
    assert len(nearest) == 3 and "llama" in nearest


def test_every_model_type_is_known_without_transformers() -> None:
    """Its list is read as text."""
    import transformers

    there = source._model_types(Path(transformers.__file__).parent)
    assert there >= set(transformers.CONFIG_MAPPING.keys())


def test_a_transformers_that_lists_its_types_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked itself."""
    assert source._model_types(tmp_path) == set()
    monkeypatch.setattr(source, "_TYPE_LISTS", ())
    (tmp_path / "config.json").write_text('{"model_type": "qwen33"}')
    assert main(["plan", str(tmp_path)]) == 2
    assert "has no model_type 'qwen33'; nearest: qwen3, " in capsys.readouterr().err


def test_without_transformers(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", config]) == 2
    assert "a config needs transformers: pip install" in capsys.readouterr().err


def test_an_error_of_transformers_is_whole(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several lines, where the last ones say what was wrong with which field."""
    from transformers import AutoConfig

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Validation error for field 'hidden_size':\n  expected int, got str")

    monkeypatch.setattr(AutoConfig, "for_model", refuse)
    assert main(["plan", config, *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.endswith(
        "transformers: ValueError: Validation error for field 'hidden_size':\n"
        "  expected int, got str\n"
    )


def test_the_activations_are_those_of_the_options() -> None:
    assert plan.ACTIVATIONS == tuple(a.value for a in Activations)


def test_the_configs_of_the_examples_are_the_models_they_are_named_for() -> None:
    billions = {
        "qwen2.5-7b": 7.62,
        "qwen2.5-7b-1m": 7.62,
        "qwen2.5-14b": 14.8,
        "qwen2.5-32b": 32.8,
        "qwen2.5-72b": 72.7,
    }
    for name, size in {**billions, "120b": 120.0}.items():
        made = target.build(
            str(ROOT / "examples" / "configs" / f"{name}.json"), batch=1, seq=8, dtype=None
        )
        assert made.parameters / 1e9 == pytest.approx(size, rel=5e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7200, "2.0 hours"), (86400 * 3, "3 days"), (86400 * 3652.5, "3,652 days (10.0 years)")],
)
def test_long_times_are_readable(seconds: float, text: str) -> None:
    assert _long(seconds) == text


DISK = ("--disk", "/absent/scratch", "--disk-memory", "1GiB", "--disk-rates", "0.1/0.1")
SHORT = ("--host-memory", "3MiB", "--gpu-memory", "1800KiB")


@pytest.mark.usefixtures("streamed")
def test_a_disk(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the host is too small, and the answer says how much of a disk would do."""
    layers = {**CONFIG, "num_hidden_layers": 12, "vocab_size": 64}
    Path(config).write_text(json.dumps(layers))
    argv = (config, *SMALL, *SHORT, "--dtype", "bfloat16", "--update-in-backward")
    without = answer(capsys, *argv, code=1)
    assert any(line.startswith("with disk= it would fit: ") for line in without["why_not"])
    found = answer(capsys, *argv, *DISK)["plan"]
    needed = found["disk"]["needed_bytes"]
    assert 0 < needed <= found["disk"]["there_bytes"] == 2**30 and found["disk"]["fits"]
    assert found["host"]["needed_bytes"] <= found["host"]["there_bytes"] == 3 * 2**20
    assert any(stream["stream"] == "read" for stream in found["streams"])
    names = [change["name"].split(" (")[0] for change in found["budgets"]]
    assert names == ["device memory", "host memory", "disk memory", "rate of the disk"]
    assert found["budgets"][3]["gain"] > 0.01
    small = (*DISK[:3], "8KiB", *DISK[4:])
    refused = answer(capsys, *argv, *small, code=1)
    assert any("more of the disk it would fit" in line for line in refused["why_not"])


@pytest.mark.parametrize("flags", [(), ("--disk-weights",), ("--disk-saved",)])
def test_what_else_may_lie_on_a_disk(config: str, flags: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    plan.arguments(parser)
    args = parser.parse_args([config, *SMALL, *DISK, *flags])
    plan.check(args)
    made = target.build(config, batch=2, seq=16, dtype=None)
    options = run_plan._options(args, made, H200)
    assert options.disk_weights == (True if "--disk-weights" in flags else None)
    assert options.disk_saved == (True if "--disk-saved" in flags else None)


@pytest.mark.usefixtures("streamed")
def test_gpus_of_one_host_share_its_disk(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {**CONFIG, "num_hidden_layers": 12, "vocab_size": 64}
    Path(config).write_text(json.dumps(layers))
    memory = ("--host-memory", "3MiB", "--gpu-memory", "1300KiB", "--update-in-backward")
    argv = (config, *SMALL, *memory, "--dtype", "bfloat16", "--gpus", "2", *DISK)
    found = answer(capsys, *argv)["plan"]
    needed = found["disk"]["needed_bytes"]
    assert 0 < needed <= found["disk"]["there_bytes"] == 2**29
    (read,) = (stream for stream in found["streams"] if stream["stream"] == "read")
    alone_s = 2 * needed / 0.1e9  # of whole pages; what is read and written is a little less
    assert 1.2 * alone_s < read["predicted_s"] < 2 * alone_s


@pytest.mark.usefixtures("streamed")
def test_where_every_part_lies_is_one_table(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {**CONFIG, "num_hidden_layers": 12, "vocab_size": 64}
    Path(config).write_text(json.dumps(layers))
    out = _printed(capsys, config, *SMALL, *SHORT, *DISK, "--update-in-backward")
    table = out[out.index("memory  ") :].split("\n\n")[0].splitlines()
    assert table[0].split() == ["memory", "device", "host", "disk"]
    parts = [line[:18].strip() for line in table[1:]]
    states = ("gradients", "optimizer states")  # gradients: what the backward has at the peak
    assert parts == ["parameters", *states, "saved tensors", "buffers", *ENDS]
    assert "with a tenth more of one resource" in out and len(out.splitlines()) <= 45


ENDS = ("needed", "available")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--disk-memory", "1GiB"), "--disk-memory 1GiB: of what? name the disk's folder"),
        (("--disk-rates", "2/2"), "--disk-rates 2/2: of what? name the disk's folder"),
        (("--disk", "/absent"), "no such folder; needed one, or, for a disk that is elsewhere"),
        ((*DISK[:4], "--disk-rates", "fast"), "--disk-rates fast: needed GB/s of reads and"),
        ((*DISK[:4], "--disk-rates", "2/-1"), "--disk-rates 2/-1: needed GB/s"),
        ((*DISK[:2], "--disk-memory", "0.5", *DISK[4:]), "--disk-memory 0.5: of what?"),
        (("--disk-weights",), "--disk-weights: where? name the disk's folder: --disk PATH"),
        (("--disk-saved",), "--disk-saved: where? name the disk's folder: --disk PATH"),
        ((*DISK, "--disk-weights", "--compute-dtype", "bfloat16"), "masters do not go to a disk"),
        ((*DISK, "--disk-weights", "--gpus", "2"), "--disk-weights: with --gpus parts of"),
        ((*DISK, "--disk-saved", "--activations", "keep"), "--activations keep nothing waits"),
    ],
)
def test_disks_that_are_refused(
    config: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main(["plan", config, *SMALL, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_disk_that_nobody_has_measured(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["plan", config, *SMALL, "--disk", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "its speed is not known" in said and "hardware --disk" in said


@pytest.mark.usefixtures("streamed")
def test_a_slower_link_makes_a_step_longer(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (config, *SMALL, "--gpu", "4090", "--gpu-memory", "16MiB")
    sheet, fast, slow = (
        answer(capsys, *argv, *link)["plan"] for link in ((), ("--link", "1"), ("--link", "0.1"))
    )
    assert sheet["step_s"] < fast["step_s"] < slow["step_s"]
    assert next(iter(slow["bounds"])) in ("h2d", "d2h")
    copies = {stream["stream"]: stream["predicted_s"] for stream in slow["streams"]}
    weights = 2 * target.build(config, batch=2, seq=16, dtype=None).parameters
    assert copies["h2d"] >= weights / 0.1e9
    assert sheet["hardware"] == "NVIDIA GeForce RTX 4090"
    assert slow["hardware"] == "NVIDIA GeForce RTX 4090 with a link of 0.1 GB/s"
    printed = _printed(capsys, *argv, "--link", "12")
    assert "on one NVIDIA GeForce RTX 4090 with a link of 12 GB/s\n" in printed


def test_ranks_exchange_over_the_link_that_is_given(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where their GPUs have no other interconnect, and unless that is given too."""
    argv = (config, *SMALL, "--gpu", "4090", "--gpus", "2", "--gpu-memory", "900KiB")
    steps = [
        answer(capsys, *argv, *options)["step_s"]
        for options in ((), ("--link", "1"), ("--link", "1", "--interconnect", "0.01"))
    ]
    assert steps == sorted(steps) and len(set(steps)) == 3


@pytest.mark.parametrize("link", ["0", "-1", "nan", "inf", "fast", "25GB", ""])
def test_links_that_are_refused(config: str, capsys: pytest.CaptureFixture[str], link: str) -> None:
    assert main(["plan", config, *SMALL, f"--link={link}"]) == 2
    said = capsys.readouterr().err
    assert f"--link {link}: needed GB/s between host and GPU, such as 25" in said
    assert said.count("\n") == 1


def test_what_does_not_fit_otherwise_runs_in_tiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.json"
    wide = {"intermediate_size": 512, "max_position_embeddings": 16384}
    path.write_text(json.dumps(CONFIG | wide))
    texts = []
    for memory, code in (("120MiB", 0), ("80MiB", 0), ("20MiB", 1)):
        long = ("--batch", "1", "--seq", "16384", "--gpu-memory", memory)
        assert main(["plan", str(path), *long]) == code
        texts.append(capsys.readouterr().out)
    whole, cut, refused = texts
    assert "tiles" not in whole
    assert "what acts on each token alone runs in 4 tiles" in cut
    assert "does NOT fit" in refused


def test_tiles_that_are_asked_for(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, *SMALL, "--tiles", "2"]) == 0
    assert "runs in 2 tiles" in capsys.readouterr().out
    assert main(["plan", config, "--tiles", "0"]) == 2
    assert "--tiles 0: needed 1 or more" in capsys.readouterr().err


def test_without_torchao(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name)
    )
    assert main(["plan", config, "--float8", "tensorwise"]) == 2
    assert "--float8 needs torchao: pip install torchao" in capsys.readouterr().err


@pytest.mark.thorough
def test_ranks_say_how_their_weights_come(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = (config, *SMALL, "--gpu", "h200", "--gpus", "2")
    reasons = answer(capsys, *ranks)["plan"]["reasons"]
    assert "buckets are gathered: there is none that all ranks stream" in reasons
    reasons = answer(capsys, *ranks, "--gpu-memory", "900KiB")["plan"]["reasons"]
    (line,) = (reason for reason in reasons if reason.startswith("streamed buckets are copied"))
    assert "whole: a step takes " in line and " where they are gathered" in line
    reasons = answer(capsys, *ranks[:-2])["plan"]["reasons"]
    assert not any("gathered" in reason for reason in reasons)
