"""What training over streamed parameters says when it refuses: how to provoke, class, sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from megacompile import accumulate, megacompile, save
from megacompile.errors import (
    BackwardError,
    CheckpointError,
    DiskError,
    ModelError,
    OptimizerError,
    OptionError,
)
from tests.checkpoints import Net, on_meta, saved
from tests.messages.said import assert_says
from tests.training import Lion

BF16 = torch.bfloat16


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def option(**options: Any) -> Callable[[Path], None]:
    return lambda folder: megacompile(net(), device="cpu", **options) and None


def disk(**options: Any) -> Callable[[Path], None]:
    return lambda folder: megacompile(net(), device="cpu", disk=folder, **options) and None


def optimizer(make: Callable[[Any], Any]) -> Callable[[Path], None]:

    def call(folder: Path) -> None:
        model = net()
        megacompile(model, device="cpu", optimizer=make(model.parameters()))

    return call


def trained(change: Callable[[Any, Any], Any], *, before: bool = False) -> Callable[[Path], None]:
    """A change of a model and its optimizer behind, or `before`, a backward that updates."""

    def call(folder: Path) -> None:
        model = net()
        made = SGD(model.parameters(), lr=0.1)
        megacompile(model, device="cpu", lowering="eager", optimizer=made)
        if not before:
            model(torch.ones(2, 8)).sum().backward()
        change(model, made)

    return call


def stepped(change: Callable[[Any, Any], Any]) -> Callable[[Path], None]:
    """A step by rule behind a change of an optimizer that has made one."""

    def call(folder: Path) -> None:
        model = net()
        megacompile(model, device="cpu", lowering="eager", state_dtype=BF16)
        made = AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            made.step()
            change(made, made.state[model[0].weight])

    return call


def loaded(
    change: Callable[[Any, Path], Any] = lambda plain, folder: None, **options: Any
) -> Callable[[Path], None]:
    """A checkpoint that does not fit."""

    def call(folder: Path) -> None:
        plain = Net()
        saved(plain, folder / "checkpoint")
        change(plain, folder / "checkpoint")
        dtype = options.get("dtype", torch.float32)
        model = on_meta(words=options.get("words", 32), layers=options.get("layers", 3)).to(dtype)
        megacompile(model, device="cpu", checkpoint=folder / "checkpoint")

    return call


def scaled(model: Any, made: Any) -> None:
    loss: Any = torch.amp.GradScaler("cpu").scale(model(torch.ones(2, 8)).sum())
    loss.backward()


def hooked(model: Any, made: Any) -> None:
    model[2].weight.register_hook(lambda g: g)
    model(torch.ones(2, 8)).sum().backward()


def changed_rate(model: Any, made: Any) -> None:
    made.param_groups[0]["lr"] = 0.5
    made.step()


def accumulates(folder: Path) -> None:
    with accumulate(net()):
        raise AssertionError("not reached")


def shares_data(folder: Path) -> None:
    model = megacompile(net(), device="cpu", lowering="eager")
    model[2].weight.data = model[0].weight.data
    model(torch.ones(2, 8))


def extra_state(folder: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    save(Extra(2, 2), folder)


def updated_twice(folder: Path) -> None:
    """By the backward and by the device."""
    model = net()
    options: Any = {"device_update": 0.5, "optimizer": SGD(model.parameters())}
    megacompile(model, device="cpu", lowering="inductor", **options)


def loads_twice(folder: Path) -> None:
    model = Net()
    saved(model, folder)
    for _ in range(2):
        megacompile(model, device="cpu", checkpoint=folder)


GONE = (
    "p.grad of '0.weight' does not exist: megacompile(model, optimizer=...) has updated in the "
    "backward, and gradients never leave the device, so they cannot be read, clipped by their "
    "global norm, unscaled by a GradScaler (if the loss was scaled, load a checkpoint: parameters "
    "and states are wrong) or used by another optimizer; leave out optimizer=, or put the backward "
    "into `with megacompile.accumulate(model):` and clip micro-batches. "
    "clip_grad_norm_(parameters, inf) returns only the norm (max_grad_norm=0 in a Trainer)"
)
REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "compute_dtype=float32": (option(compute_dtype=torch.float32), OptionError,
     "megacompile(): got compute_dtype=torch.float32; needed None or one of torch.bfloat16, "
     "torch.float16"),
    "grad_dtype=1.0": (option(grad_dtype=1.0), OptionError,
     "megacompile(): got grad_dtype=1.0; needed None or one of torch.bfloat16, "
     "torch.float16, torch.float32"),
    "state_dtype='int4'": (option(state_dtype="int4"), OptionError,
     "megacompile(): got state_dtype='int4'; needed None or one of torch.float32, "
     "torch.bfloat16, 'int8'"),
    "device_update=nan": (option(device_update=float("nan"), lowering="inductor"), OptionError,
     "megacompile(): got device_update=nan; needed None or a number from 0 to 1"),
    "device_update, eager": (option(device_update=0.5, lowering="eager"), OptionError,
     "megacompile(): got device_update=0.5 with lowering='eager', which updates with "
     "torch.optim itself; leave out device_update, or use lowering='inductor'"),
    "disk, absent": (option(disk="/absent/folder"), OptionError,
     "megacompile(): got disk='/absent/folder'; needed a folder that this process can write to, "
     "on a local disk"),
    "disk_memory alone": (option(disk_memory=2**30), OptionError,
     "megacompile(): got disk_memory=1073741824 without disk=; pass disk='/folder' too, or "
     "leave out disk_memory"),
    "disk_weights alone": (option(disk_weights=True), OptionError,
     "megacompile(): got disk_weights=True without disk=; pass disk='/folder' too, or leave "
     "out disk_weights"),
    "disk_weights, masters": (
     option(disk="/tmp", disk_weights=True, compute_dtype=BF16), OptionError,
     "megacompile(): got disk_weights=True with compute_dtype=torch.bfloat16; float32 masters "
     "cannot be on a disk; leave out compute_dtype, or leave out disk_weights"),
    "disk_weights, device_update": (
     option(disk="/tmp", disk_weights=True, device_update=0.5, lowering="inductor"), OptionError,
     "megacompile(): got device_update=0.5 with disk_weights=True; the host updates parameters "
     "on a disk; leave one of them out"),
    "disk_saved, recompute": (
     option(disk="/tmp", disk_saved=True, activations="recompute"), OptionError,
     "megacompile(): got disk_saved=True with activations='recompute'; only offloaded tensors "
     "go on to a disk; use activations='offload', or leave out disk_saved"),
    "a disk too small for parameters": (
     disk(disk_memory=4096, disk_weights=True, lowering="eager"), DiskError,
     "disk_memory=4 KiB is too small: 0 B are used in FOLDER, and 8 KiB more are needed; raise "
     "disk_memory="),
    "optimizer=Adagrad": (optimizer(Adagrad), OptionError,
     "megacompile(): got optimizer=Adagrad; needed one that can update in the backward: AdamW, "
     "Adam, SGD or Lion; or leave it out: optimizer.step() works with every optimizer"),
    "differentiable": (optimizer(lambda p: Adam(p, differentiable=True)), OptionError,
     "megacompile(): the optimizer is differentiable or capturable; needed one without these "
     "flags, to update in the backward"),
    "decoupled": (optimizer(lambda p: Lion(p, decoupled_weight_decay=True)), OptionError,
     "megacompile(): got optimizer=Lion (decoupled_weight_decay=True divides by the optimizer's "
     "initial lr); needed one that can update in the backward: AdamW, Adam, SGD or Lion; or leave "
     "it out: optimizer.step() works with every optimizer"),
    "not in the optimizer": (optimizer(lambda p: SGD(list(p)[:3])), OptionError,
     "megacompile(): parameter 2.bias is not in the optimizer that updates in the backward; add "
     "it, or freeze it (requires_grad_(False))"),
    "device_update, in the backward": (updated_twice, OptionError,
     "megacompile(): got device_update=0.5 with optimizer=..., which makes every update in the "
     "backward; leave one of them out"),
    "a gradient that is gone": (trained(lambda model, _: model[0].weight.grad * 2), OptimizerError,
     GONE),
    "a second backward": (
     trained(lambda model, _: model(torch.ones(2, 8)).sum().backward()), OptimizerError,
     "parameter '0.weight' was updated in a backward already, and gets another gradient before "
     "optimizer.step(): call step() after each backward, put all micro-batches but the last into "
     "`with megacompile.accumulate(model):`, or, if two captured graphs use one parameter because "
     "of a graph break, leave out optimizer="),
    "a scaled loss": (trained(scaled, before=True), OptimizerError,
     "the loss of this backward was scaled by a GradScaler, but megacompile(model, "
     "optimizer=...) updates in the backward, before the gradients can be unscaled (nothing was "
     "updated): leave out optimizer=, or the GradScaler, which bfloat16 does not need"),
    "a hook": (trained(hooked, before=True), BackwardError,
     "Sequential: the gradient of '2.weight' is requested by a hook or by backward(inputs=...), "
     "or it comes in several parts in this backward: it is also used outside of the model, the "
     "model or a module in it was called twice, or a graph break lets two captured graphs use it; "
     "but gradients never leave the device if the backward updates; leave out optimizer= of "
     "megacompile(), or put this backward into `with megacompile.accumulate(model):`"),
    "an option changed": (trained(changed_rate), OptimizerError,
     "optimizer.step(): a parameter group was changed between backward() and step(), but the "
     "backward has already run the update; change it after step(), as lr schedulers do"),
    "accumulate": (accumulates, ModelError,
     "accumulate(): Sequential was not megacompiled with optimizer=... or mesh=...; without "
     "them every backward accumulates, and no mark is needed"),
    "betas": (stepped(lambda made, _: made.param_groups[0].update(betas=(0.9,))), OptimizerError,
     "AdamW.step(): param_groups[0] has betas=(0.9,) (tuple); needed two numbers of at least 0, "
     "below 1; nothing was updated: set optimizer.param_groups[0]['betas'], and call it again"),
    "shared data": (shares_data, ModelError,
     "megacompile(): parameters Sequential.0.weight and Sequential.2.weight share memory through "
     "their .data; tie them by using one nn.Parameter in both places, or clone one"),
    "checkpoint={}": (option(checkpoint={}), OptionError,
     "megacompile(): got a dict as checkpoint=; needed a path (a folder of safetensors) or a "
     "megacompile.Checkpoint; call load_state_dict() for a state dict"),
    "no folder": (
     lambda folder: megacompile(on_meta(), device="cpu", checkpoint=folder / "none"),
     CheckpointError,
     "megacompile(): checkpoint FOLDER/none does not exist; needed a folder of safetensors "
     "(download it first), or one .safetensors file"),
    "other shapes": (loaded(words=16), CheckpointError,
     "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
     "  shapes (1): embed.weight got (32, 8), needed (16, 8)\n"
     "    build the model with the checkpoint's config"),
    "missing": (loaded(layers=4), CheckpointError,
     "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
     "  missing (8): layers.3.norm.weight; layers.3.norm.bias; layers.3.norm.running_mean; "
     "layers.3.norm.running_var; layers.3.norm.num_batches_tracked; ...\n"
     "    initialize=(pattern, ...) of megacompile.Checkpoint initializes them at random; "
     "names=... translates names"),
    "unexpected": (loaded(layers=2), CheckpointError,
     "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
     "  unexpected (8): layers.2.norm.num_batches_tracked; layers.2.down.weight; "
     "layers.2.norm.bias; layers.2.norm.running_mean; layers.2.norm.running_var; ...\n"
     "    ignore=(pattern, ...) of megacompile.Checkpoint leaves them out; or build the model "
     "that has them"),
    "fewer digits": (loaded(dtype=BF16), CheckpointError,
     "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
     "  dtypes (22): embed.weight got torch.float32, needed torch.bfloat16; layers.0.norm.weight "
     "got torch.float32, needed torch.bfloat16; layers.0.norm.bias got torch.float32, needed "
     "torch.bfloat16; layers.0.norm.running_mean got torch.float32, needed torch.bfloat16; "
     "layers.0.norm.running_var got torch.float32, needed torch.bfloat16; ...\n"
     "    model.to(dtype) before megacompile() costs nothing on meta; cast=True of "
     "megacompile.Checkpoint rounds"),
    "torch.save": (
     loaded(lambda plain, folder: torch.save({}, folder / "model.safetensors")), CheckpointError,
     "megacompile(): file FOLDER/checkpoint/model.safetensors was written by torch.save(); needed "
     "safetensors; leave out checkpoint= and call model.load_state_dict(torch.load(...)) after "
     "megacompile()"),
    "other format": (
     loaded(lambda plain, folder: (folder / "model.safetensors").rename(folder / "a.bin")),
     CheckpointError,
     "megacompile(): folder FOLDER/checkpoint has no checkpoint, or several: got a.bin; needed "
     "model.safetensors, one *.safetensors.index.json, or one *.safetensors (of "
     "safetensors.torch.save_file, or save_pretrained of transformers); pass the path of one of "
     "several; for .bin or .pt leave out checkpoint=, and call load_state_dict() afterwards"),
    "loaded twice": (loads_twice, OptionError,
     "megacompile(): Net is megacompiled already, and has values; pass checkpoint= in the first "
     "call, or use model.load_state_dict()"),
    "saved from meta": (lambda folder: save(on_meta(), folder), CheckpointError,
     "save(): Net has tensors on the meta device, which have no values; needed a model in "
     "memory; save it after megacompile()"),
    "max_shard_size=0": (lambda folder: save(net(), folder, max_shard_size=0), OptionError,
     "save(): got max_shard_size=0; needed at least 1 byte"),
    "extra state": (extra_state, CheckpointError,
     "save(): Extra._extra_state is dict; safetensors stores only tensors; use "
     "torch.save(model.state_dict(), file)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    provoke, error, text = REFUSED[name]
    assert_says(lambda: provoke(tmp_path), error, text.replace("FOLDER", str(tmp_path)))
