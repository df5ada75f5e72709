"""The demo: streamed and plain print the same losses, a resumed run goes on exactly, bad flags."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import train_lm
from torch import nn

from benchmarks import precision
from tests.draws import drawn

TINY = (
    *("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16"),
    *("--steps", "6", "--warmup", "2", "--validate-every", "3", "--corpus-bytes", "100000"),
)


@pytest.mark.parametrize(
    "flags",
    drawn(
        [("--dropout", "0.3"), ("--accumulate", "1", "--clip", "0.1")],
        [(), ("--dtype", "bfloat16")],
    ),
    ids=" ".join,
)
def test_streamed_losses_are_the_plain_ones(flags: tuple[str, ...]) -> None:
    plain = train_lm.main([*TINY, *flags, "--plain"])
    streamed = train_lm.main([*TINY, *flags])
    assert sorted(plain.train) == [1, 2, 3, 4, 5, 6]
    assert sorted(plain.validation) == [3, 6]
    assert streamed == plain  # every bit of every loss


@pytest.mark.parametrize("recipe", train_lm.FLOAT8)
def test_float8_is_streamed_as_it_is_plain(tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("torchao.float8")
    path = tmp_path / "run.pt"
    flags = [*TINY, "--dtype", "bfloat16"]
    float8 = [*flags, "--float8", recipe]
    plain = train_lm.main([*float8, "--plain"])
    assert train_lm.main([*float8, "--checkpoint", str(path), "--stop-at", "2"]).train == {
        step: plain.train[step] for step in (1, 2)
    }
    resumed = train_lm.main([*float8, "--resume", str(path)])
    assert resumed.train == {step: plain.train[step] for step in (3, 4, 5, 6)}
    assert resumed.validation == plain.validation
    assert plain.validation != train_lm.main([*flags, "--plain"]).validation
    assert plain.train[1] == pytest.approx(train_lm.main([*flags, "--stop-at", "1"]).train[1], 0.01)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float8_leaves_the_head_as_it_is(device: str) -> None:
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    gpt = train_lm.GPT(layers=2, width=32, heads=2, context=16)
    train_lm.to_float8(gpt.blocks, "rowwise", torch.device(device))
    converted = [m for m in gpt.modules() if isinstance(m, float8.Float8Linear)]
    assert len(converted) == 2 * 4 and type(gpt.head) is nn.Linear
    assert {m.config.emulate for m in converted} == {device == "cpu"}


def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name)
    )


def test_float8_without_torchao(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torchao(monkeypatch)
    with pytest.raises(SystemExit) as exit_:
        train_lm.main([*TINY, "--float8", "rowwise"])
    assert exit_.value.code == 2
    assert "error: --float8 needs torchao: pip install torchao" in capsys.readouterr().err


def test_precisions_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchao, all but float8."""
    without_torchao(monkeypatch)
    monkeypatch.setattr(precision, "VALIDATE_EVERY", 2)
    names = ["float32", "bfloat16, bfloat16 moments", "float32 masters, float8 tensorwise"]
    only = [part for name in names for part in ("--only", name)]
    rows = precision.main([*only, *TINY[:-4], "--corpus-bytes", "100000"])
    assert [row["parameters and moments"] for row in rows] == names[:2]
    assert rows[0]["to float32"] == "+0.00%"
    for row in rows:
        assert "validation loss" in row and "step 4" in row and "step 6" not in row
    assert f"left out, for want of torchao: {names[2]}" in capsys.readouterr().out


def test_loss_falls() -> None:
    losses = train_lm.main([*TINY, "--plain", "--steps", "60", "--learning-rate", "0.01"])
    assert losses.train[1] > 5.3
    assert losses.train[60] < 4.2
    assert losses.validation[60] < 4.2


@pytest.mark.parametrize("before", drawn(["streamed"], ["plain"]))
@pytest.mark.parametrize("after", ["plain", "streamed"])
def test_resumed_run_goes_on_exactly(tmp_path: Path, before: str, after: str) -> None:
    flags = [*TINY, "--dropout", "0.3"]  # so that the random state matters
    path = tmp_path / "run.pt"
    extra = {"plain": ["--plain"], "streamed": []}
    whole = train_lm.main([*flags, "--plain"])

    first = train_lm.main([*flags, *extra[before], "--checkpoint", str(path), "--stop-at", "2"])
    second = train_lm.main([*flags, *extra[after], "--resume", str(path)])

    assert first.train == {step: whole.train[step] for step in (1, 2)}
    assert second.train == {step: whole.train[step] for step in (3, 4, 5, 6)}
    assert second.validation == whole.validation


def test_checkpoint_is_written_along_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    monkeypatch.setattr(train_lm, "save", lambda path, run: steps.append(run.step))
    flags = ["--checkpoint", str(tmp_path / "run.pt"), "--checkpoint-every", "4"]
    train_lm.main([*TINY, "--plain", *flags])
    assert steps == [4, 6]


def test_prints_losses_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    losses = train_lm.main([*TINY])
    out = capsys.readouterr().out
    assert f"step     1   loss {losses.train[1]:.8f}" in out
    assert f"step     3   validation loss {losses.validation[3]:.8f}" in out
    assert out.splitlines()[-1].startswith(f"final: loss {losses.train[6]:.8f}")
    for action in (r"\dPREFETCH@\d", r"\dF", r"\dRECOMPUTE", r"\dB", r"\dOFFLOAD_GRAD"):
        assert re.search(rf"\b{action}\b", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "30", "--heads", "4"], "got --heads 4, needed a divisor of --width 30"),
        (["--batch", "0"], "argument --batch: got '0', needed an integer from 1"),
        (["--steps", "many"], "argument --steps: got 'many', needed an integer from 1"),
        (["--clip", "nan"], "argument --clip: got 'nan', needed a number from 0"),
        (["--dropout", "1"], "argument --dropout: got '1', needed a number from 0 to below 1"),
        (["--device", "meta"], "argument --device: got 'meta', needed 'cpu'"),
        (["--device", "cuda:99"], "argument --device: got 'cuda:99', but this machine has"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--float8", "mxfp8"], "argument --float8: invalid choice: 'mxfp8'"),
        (["--float8", "rowwise", "--width", "40"], "got --width 40, needed a multiple of 16"),
        (["--float8", "rowwise", "--context", "20"], "got --context 20, needed a multiple of 16"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["--stop-at", "7"], "got --stop-at 7, but the run ends at --steps 6"),
        (["--checkpoint-every", "2"], "got --checkpoint-every, needed --checkpoint PATH"),
        (["--checkpoint", "no/such/run.pt"], "needed a path in a folder that exists"),
        (["--resume", "no/such/run.pt"], "got --resume no/such/run.pt, needed a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flag_says_what_it_needs(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_lm.main([*TINY, *flags])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_text_too_short_for_a_sequence() -> None:
    with pytest.raises(SystemExit, match="got 10 bytes of text, needed 17 .* --corpus-bytes"):
        train_lm.main([*TINY, "--plain", "--corpus-bytes", "100"])


def test_resume_of_another_run_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train_lm.main([*TINY, "--plain", "--checkpoint", str(path), "--stop-at", "1"])
    with pytest.raises(SystemExit, match="other flags or data: seed was 0, is 1; layers was 2"):
        train_lm.main([*TINY, "--plain", "--resume", str(path), "--seed", "1", "--layers", "3"])
    with pytest.raises(SystemExit, match="is at step 1, and the run ends at step 1"):
        train_lm.main([*TINY, "--plain", "--resume", str(path), "--stop-at", "1"])


def test_resume_of_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_text("not a checkpoint")
    with pytest.raises(SystemExit, match="is not a checkpoint of this program"):
        train_lm.main([*TINY, "--plain", "--resume", str(path)])
