"""`megacompile(model_on_meta, checkpoint=...)`: values, errors, and what is left after an error."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import (
    Checkpoint,
    CheckpointError,
    MissingExtraError,
    ModelError,
    megacompile,
    save,
)
from tests import inside
from tests.checkpoints import Net, ids, on_meta, saved, values
from tests.equality.nets import Applies, from_config
from tests.processes import python
from tests.training import losses_of
from tests.zoo import unlike

pytest.importorskip("safetensors")
SECOND, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"


@pytest.fixture
def plain() -> Net:
    torch.manual_seed(0)
    model = Net()
    model(ids()).backward()  # statistics of the BatchNorms
    model.zero_grad()
    return model


def steps(model: nn.Module, batch: torch.Tensor | None = None) -> list[float]:
    given = {"ids": ids() if batch is None else batch}
    return losses_of(model, torch.optim.AdamW(model.parameters()), [given] * 3)


def loaded(checkpoint: Any, make: Any = Net, **options: Any) -> Any:
    return megacompile(on_meta(make), checkpoint=checkpoint, **options)


def assert_loads(plain: nn.Module, checkpoint: Any, make: Any = Net) -> Any:
    model = loaded(checkpoint, make)
    assert unlike(values(plain), values(model)) == []
    return model


@pytest.mark.parametrize("resident", [0, "all"])
def test_a_model_on_meta_trains_as_the_one_that_was_saved(
    plain: Net, tmp_path: Path, resident: Any
) -> None:
    saved(plain, tmp_path, 3)
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())  # made before: it keeps the parameters
    objects = {name: param for name, param in model.named_parameters()}
    state = torch.get_rng_state()
    assert megacompile(model, checkpoint=tmp_path, resident=resident) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param is objects[name] for name, param in model.named_parameters())
    assert optimizer.param_groups[0]["params"] == list(objects.values())
    assert model.head.weight is model.embed.weight
    assert unlike(values(plain), values(model)) == []
    assert steps(plain) == steps(model)
    assert unlike(values(plain), values(model)) == []


def test_a_file_or_an_index_may_be_given(plain: Net, tmp_path: Path) -> None:
    """Tied weights may be there twice, and the model may have values."""
    from safetensors.torch import save_file

    saved(plain, tmp_path / "two", 2)
    twice = {name: value.clone() for name, value in plain.state_dict().items()}
    save_file(twice, tmp_path / "other.safetensors")
    for given in (tmp_path / "two" / INDEX, tmp_path / "other.safetensors", str(tmp_path)):
        assert_loads(plain, given)
    model: Any = Net()
    model.layers[0].scale.fill_(3.0)  # not persistent: it stays
    megacompile(model, checkpoint=str(tmp_path))
    assert unlike(values(plain), values(model)) == ["layers.0.scale"]


def conv() -> Any:
    made: Any = nn.Sequential(nn.Conv2d(3, 4, 3))
    return made.to(memory_format=torch.channels_last)


def lstm() -> Any:
    """It has a list of its parameters, and weak references."""
    return nn.LSTM(4, 4)


def test_other_strides_and_other_references_are_kept(tmp_path: Path) -> None:
    for make in (conv, lstm):
        plain = make()
        save(plain, tmp_path / make.__name__)
        model = assert_loads(plain, tmp_path / make.__name__, make)
        if make is lstm:
            x = torch.randn(3, 2, 4)
            assert torch.equal(model(x)[0], plain(x)[0])
        else:
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_masters_are_read_from_fewer_digits(plain: Net, tmp_path: Path) -> None:
    """Where they are lost, somebody has asked for that; a streamed copy has what was read."""
    saved(plain, tmp_path / "all")
    half = on_meta().bfloat16()
    with pytest.raises(CheckpointError, match="dtypes"):
        megacompile(half, checkpoint=tmp_path / "all")
    megacompile(half, checkpoint=Checkpoint(tmp_path / "all", cast=True))
    assert torch.equal(half.embed.weight, plain.embed.weight.bfloat16())
    large, short = nn.Linear(1024, 1025), nn.Linear(1024, 1025, dtype=torch.bfloat16)
    saved(large, tmp_path / "large")  # more than is read at once
    megacompile(short, checkpoint=Checkpoint(tmp_path / "large", cast=True))
    assert torch.equal(short.weight, large.weight.bfloat16())
    dtypes: dict[str, Any] = {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
    saved(plain.bfloat16(), tmp_path / "half")
    model = loaded(tmp_path / "half", **dtypes)
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), param.float())
    make: Any = functools.partial(nn.Linear, 4, 4)
    layer = make()
    saved(layer, tmp_path / "layer")
    model = loaded(tmp_path / "layer", make, **dtypes)
    x = torch.randn(3, 4)
    y = model(x)
    y.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
    assert torch.equal(y, layer.bfloat16()(x.bfloat16()))


def wrapped() -> Any:
    return Applies(lambda m, x: m.inner(x), inner=nn.Sequential(Net()))


def test_the_path_of_a_wrapper_is_left_out(plain: Net, tmp_path: Path) -> None:
    """And names may be translated."""
    saved(plain, tmp_path / "inner")
    model = loaded(tmp_path / "inner", wrapped)
    assert unlike(values(plain), values(model.inner[0])) == []
    saved(model, tmp_path / "whole")
    assert_loads(model, tmp_path / "whole", wrapped)
    translated = Checkpoint(tmp_path / "whole", names=lambda name: f"inner.0.{name}")
    assert_loads(plain, translated)


def test_names_that_do_not_fit_are_listed_and_may_be_allowed(plain: Net, tmp_path: Path) -> None:
    saved(Net(layers=2, tied=False), tmp_path)
    model = on_meta()
    given = Checkpoint(tmp_path, initialize="layers.2.*")
    for checkpoint, name in ((tmp_path, "layers.2.norm.weight"), (given, "head.weight")):
        with pytest.raises(CheckpointError, match=name):
            megacompile(model, checkpoint=checkpoint)
        assert all(param.is_meta for param in model.parameters())
    small = on_meta(layers=1, tied=False)
    with pytest.raises(CheckpointError, match="layers.1."):
        megacompile(small, checkpoint=tmp_path)
    megacompile(small, checkpoint=Checkpoint(tmp_path, ignore=("layers.1.*",)))
    torch.manual_seed(7)
    grown = megacompile(on_meta(tied=False), checkpoint=given)
    torch.manual_seed(7)
    torch.rand(1), torch.rand(1)  # the blocks before it have a buffer that the checkpoint lacks
    like = on_meta().layers[2].to_empty(device="cpu")
    like.up.reset_parameters()
    like.down.reset_parameters()
    for name in ("up", "down"):
        assert torch.equal(getattr(grown.layers[2], name).weight, getattr(like, name).weight)


def _index(place: str) -> Callable[[Path], object]:
    text = json.dumps({"weight_map": dict.fromkeys(["embed.weight"], place)})
    return lambda folder: (folder / INDEX).write_text(text)


def _old_torch_save(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / SECOND, _use_new_zipfile_serialization=False)


def _other_names(folder: Path) -> None:
    for k, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"part{k}.safetensors")


def _twice(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND.replace("00002", "00001", 1)).read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {  # beside test_saving.py
    "old torch.save": _old_torch_save,
    "a file": lambda folder: (folder / SECOND).unlink(),
    "index": lambda folder: (folder / INDEX).unlink(),
    "outside": _index("../model.safetensors"),
    "other index": _index(SECOND),
    "several": _other_names,
    "two indices": lambda folder: (folder / f"other.{INDEX[6:]}").write_text("{}"),
    "twice": _twice,
}


def test_damaged_checkpoints_are_refused(plain: Net, tmp_path: Path) -> None:
    model = on_meta()
    for name, damage in DAMAGE.items():
        folder = saved(plain, tmp_path / name, 3)
        damage(folder)
        with pytest.raises(CheckpointError, match=str(folder)):
            megacompile(model, checkpoint=folder)
        assert all(param.is_meta for param in model.parameters()), name
    with pytest.raises(CheckpointError, match="none"):
        megacompile(model, checkpoint=tmp_path / "none")


def test_a_file_that_shrinks_or_an_interrupt_while_it_is_read(plain: Net, tmp_path: Path) -> None:
    """The model is as before, on meta or with its values, and can be loaded later."""
    saved(plain, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()

    def shrink() -> None:
        os.truncate(file, 1000)

    def interrupt() -> None:
        raise KeyboardInterrupt

    torch.manual_seed(1)
    for model in (on_meta(), Net()):
        before = {name: value for name, value in model.named_parameters()}
        kept = None if before["embed.weight"].is_meta else values(model)
        for fault, error in ((shrink, CheckpointError), (interrupt, KeyboardInterrupt)):
            file.write_bytes(whole)
            with inside.before_reads(fault), pytest.raises(error):
                megacompile(model, checkpoint=tmp_path)
            assert all(param is before[name] for name, param in model.named_parameters())
            if kept is None:
                assert all(value.is_meta for value in [*before.values(), *model.buffers()])
                assert model(torch.empty(4, dtype=torch.int64, device="meta")).is_meta
            else:
                assert unlike(kept, values(model)) == []
        file.write_bytes(whole)
        loaded = values(megacompile(model, checkpoint=tmp_path))
        assert unlike(values(plain), loaded) in ([], [n for n in loaded if n.endswith("scale")])


def test_what_is_given_is_refused(
    plain: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook on meta; layers on meta that come later; without the package that reads files."""
    saved(plain, tmp_path)
    model = on_meta()
    model.embed.weight.register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match="embed.weight"):
        megacompile(model, checkpoint=tmp_path)
    model = loaded(tmp_path)
    model.layers.append(on_meta().layers[0])
    with pytest.raises(ModelError, match="layers.3"):
        model(ids())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match="safetensors"):
        loaded(tmp_path)


def mixtral(layers: int = 1, experts: int = 3) -> Any:
    pytest.importorskip("transformers")
    return from_config("mixtral", num_hidden_layers=layers, num_local_experts=experts)


def test_experts_that_are_stored_apart(tmp_path: Path) -> None:
    """A group of them may lie in several files. A base model reads them too."""
    plain = mixtral(layers=2)
    plain.save_pretrained(tmp_path, max_shard_size="4KB")
    around = loaded(tmp_path, lambda: Applies(lambda m: None, model=mixtral(layers=2)))
    assert unlike(values(plain), values(around.model)) == []
    base = on_meta(lambda: mixtral(layers=2).model)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        megacompile(base, checkpoint=tmp_path)
    megacompile(base, checkpoint=Checkpoint(tmp_path, ignore="lm_head.*"))
    assert unlike(values(plain.model), values(base)) == []


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    four, other = (on_meta(mixtral, experts=4) for _ in range(2))
    other.model.layers[0].mlp.gate.weight = nn.Parameter(torch.empty(3, 16, device="meta"))
    half = on_meta(mixtral)
    half.model.layers[0].mlp.experts.bfloat16()
    for model, match in (
        (four, "shapes"),  # the router, before anything is read
        (other, "experts"),
        (half, "experts.gate_up_proj"),
        (on_meta(mixtral, layers=2), "layers.1.mlp.gate.weight"),
    ):
        with pytest.raises(CheckpointError, match=match):
            megacompile(model, checkpoint=tmp_path)
        assert all(param.is_meta for param in model.parameters())


def hrm() -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "HrmTextConfig"):
        pytest.skip("needs a model whose q, k and v are stored as one")
    config = transformers.HrmTextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_layers_per_stack=1,
        num_attention_heads=2,
        head_dim=8,
        H_cycles=1,
        L_cycles=1,
        L_bp_cycles=[1],
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def test_tensors_that_are_stored_as_one(tmp_path: Path) -> None:
    """One of the checkpoint becomes several; and the other way when it is saved."""
    import safetensors.torch

    plain = hrm()
    plain.save_pretrained(tmp_path / "theirs")
    save(assert_loads(plain, tmp_path / "theirs", hrm), tmp_path / "ours")
    theirs, ours = (
        safetensors.torch.load_file(tmp_path / which / "model.safetensors")
        for which in ("theirs", "ours")
    )
    assert any("qkv" in name for name in ours) and unlike(theirs, ours) == []


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, "all", "auto"])
def test_on_a_gpu_what_is_read_is_page_locked_and_trains(tmp_path: Path, resident: Any) -> None:
    torch.manual_seed(0)
    plain = Net(layers=2, width=64, words=256)
    saved(plain, tmp_path, 2)
    options: dict[str, Any] = {"lowering": "eager", "resident": resident}
    model = megacompile(
        on_meta(layers=2, width=64, words=256), checkpoint=tmp_path, device="cuda", **options
    )
    assert unlike(values(plain), {n: v.cpu() for n, v in values(model).items()}) == []
    on_device = [param.is_cuda for param in model.parameters()]
    assert all(on_device) if resident == "all" else not any(on_device)
    assert all(param.is_cuda or param.is_pinned() for param in model.parameters())
    reference = megacompile(plain, device="cuda", **options)
    assert steps(reference, ids().cuda()) == steps(model, ids().cuda())


_PEAK = """
import sys
from pathlib import Path
from benchmarks.process_memory import status_bytes
from megacompile import megacompile
from tests.checkpoints import Net, on_meta

megacompile(on_meta(layers=1), device="cpu")  # what a first call imports
model = on_meta(layers=8, width=1024)
Path("/proc/self/clear_refs").write_text("5")
before = status_bytes("VmHWM")
megacompile(model, device="cpu", checkpoint=sys.argv[1])
print(status_bytes("VmHWM") - before, status_bytes("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_at_the_peak_there_is_no_more_than_the_model(tmp_path: Path) -> None:
    """Every tensor goes straight into its bucket; one at a time has a copy in other digits."""
    model = Net(layers=8, width=1024)
    size = sum(param.nbytes for param in model.parameters())
    save(model.bfloat16(), tmp_path, max_shard_size="64MiB")
    done = python("-c", _PEAK, str(tmp_path))
    peak, steady = map(int, done.stdout.split()[-2:])
    assert 0.9 * size < steady < 1.1 * size + 2**25
    assert peak < 1.05 * size + 3 * 2**24  # another copy would add half of it
