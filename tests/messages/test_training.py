"""What training over streamed parameters says when it refuses: how to provoke, class, sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import megacompile as mc
from megacompile import accumulate, errors, megacompile, save
from megacompile.runtime.device.activations import HostPool
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.disk.scratch import ScratchFile
from tests.checkpoints import Net, on_meta, saved
from tests.lion import Lion

pytestmark = pytest.mark.filterwarnings("ignore:megacompile")
BF16 = torch.bfloat16


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def option(**options: Any) -> Callable[[Path], None]:
    """A call with these options."""
    return lambda folder: megacompile(net(), device="cpu", **options) and None


def disk(**options: Any) -> Callable[[Path], None]:
    """The same with a disk."""
    return lambda folder: megacompile(net(), device="cpu", disk=folder, **options) and None


def optimizer(make: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A call with an optimizer."""

    def call(folder: Path) -> None:
        model = net()
        megacompile(model, device="cpu", optimizer=make(model.parameters()))

    return call


def trained(change: Callable[[Any, Any], Any], **options: Any) -> Callable[[Path], None]:
    """A change of a model and its optimizer behind a backward of the update in the backward."""

    def call(folder: Path) -> None:
        model = net()
        made = options.get("make", SGD)(model.parameters(), lr=0.1)
        megacompile(model, device="cpu", lowering="eager", optimizer=made)
        if not options.get("before"):
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


def rewritten(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A checkpoint whose file is damaged."""

    def change(plain: Any, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(data(file.read_bytes()))

    return loaded(change)


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


def changed_in_between(folder: Path) -> None:
    model = megacompile(net(), device="cpu", lowering="eager")
    loss = model(torch.ones(2, 8)).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    loss.backward()


def shares_data(folder: Path) -> None:
    model = megacompile(net(), device="cpu", lowering="eager")
    model[2].weight.data = model[0].weight.data
    model(torch.ones(2, 8))


def changed_input(folder: Path) -> None:
    model = megacompile(net(), device="cpu", lowering="eager", activations="keep")
    x = torch.ones(2, 8)
    loss = model(x).sum()
    x.mul_(2)
    loss.backward()


def no_place(folder: Path) -> None:
    file = ScratchFile(folder, limit_bytes=65536)
    file.take(32768)
    file.take(32769)


def extra_state(folder: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    save(Extra(2, 2), folder)


def pool(folder: Path) -> None:
    of = HostPool(pin=False, budget=HostBudget(2**20))
    of.store(torch.zeros(2**19), None)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "compute_dtype=float32": (option(compute_dtype=torch.float32), errors.OptionError),
    "compute_dtype='bf16'": (option(compute_dtype="bf16"), errors.OptionError),
    "compute_dtype=16": (option(compute_dtype=16), errors.OptionTypeError),
    "grad_dtype=int8": (option(grad_dtype=torch.int8), errors.OptionError),
    "grad_dtype=1.0": (option(grad_dtype=1.0), errors.OptionTypeError),
    "state_dtype='int4'": (option(state_dtype="int4"), errors.OptionError),
    "state_dtype=float64": (option(state_dtype=torch.float64), errors.OptionError),
    "state_dtype=8": (option(state_dtype=8), errors.OptionTypeError),
    "stochastic_rounding=1": (option(stochastic_rounding=1), errors.OptionTypeError),
    "device_update=1.1": (option(device_update=1.1, lowering="inductor"), errors.OptionError),
    "device_update=nan": (
        option(device_update=float("nan"), lowering="inductor"),
        errors.OptionError,
    ),
    "device_update='all'": (
        option(device_update="all", lowering="inductor"),
        errors.OptionTypeError,
    ),
    "device_update, eager": (option(device_update=0.5, lowering="eager"), errors.OptionError),
    "disk=3": (option(disk=3), errors.OptionTypeError),
    "disk, absent": (option(disk="/absent/folder"), errors.OptionError),
    "disk_memory alone": (option(disk_memory=2**30), errors.OptionError),
    "disk_memory=-1": (option(disk="/tmp", disk_memory=-1), errors.OptionError),
    "disk_weights alone": (option(disk_weights=True), errors.OptionError),
    "disk_weights=1": (option(disk="/tmp", disk_weights=1), errors.OptionTypeError),
    "disk_weights, masters": (
        option(disk="/tmp", disk_weights=True, compute_dtype=BF16),
        errors.OptionError,
    ),
    "disk_weights, device_update": (
        option(disk="/tmp", disk_weights=True, device_update=0.5, lowering="inductor"),
        errors.OptionError,
    ),
    "disk_saved alone": (option(disk_saved=True), errors.OptionError),
    "disk_saved, recompute": (
        option(disk="/tmp", disk_saved=True, activations="recompute"),
        errors.OptionError,
    ),
    "disk_saved=1": (option(disk="/tmp", disk_saved=1), errors.OptionTypeError),
    "a small disk": (no_place, errors.DiskError),
    "a disk too small for parameters": (
        disk(disk_memory=4096, disk_weights=True, lowering="eager"),
        errors.DiskError,
    ),
    "no host memory": (pool, errors.HostMemoryError),
    "optimizer=Adagrad": (optimizer(Adagrad), errors.OptionError),
    "optimizer=3": (optimizer(lambda params: 3), errors.OptionTypeError),
    "differentiable": (optimizer(lambda p: Adam(p, differentiable=True)), errors.OptionError),
    "decoupled": (optimizer(lambda p: Lion(p, decoupled_weight_decay=True)), errors.OptionError),
    "not in the optimizer": (optimizer(lambda p: SGD(list(p)[:3])), errors.OptionError),
    "device_update, in the backward": (
        lambda folder: megacompile(
            model := net(),
            device="cpu",
            lowering="inductor",
            device_update=0.5,
            optimizer=SGD(model.parameters()),
        ),
        errors.OptionError,
    ),
    "a gradient that is gone": (
        trained(lambda model, _: model[0].weight.grad * 2),
        errors.OptimizerError,
    ),
    "clipped too late": (
        trained(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)),
        errors.OptimizerError,
    ),
    "a second backward": (
        trained(lambda model, _: model(torch.ones(2, 8)).sum().backward()),
        errors.OptimizerError,
    ),
    "a scaled loss": (trained(scaled, before=True), errors.OptimizerError),
    "a hook": (trained(hooked, before=True), errors.BackwardError),
    "an option changed": (trained(changed_rate), errors.OptimizerError),
    "accumulate": (accumulates, errors.ModelError),
    "lr": (stepped(lambda made, _: made.param_groups[0].update(lr="0.1")), errors.OptimizerError),
    "betas": (
        stepped(lambda made, _: made.param_groups[0].update(betas=(0.9,))),
        errors.OptimizerError,
    ),
    "a state of another shape": (
        stepped(lambda _, state: state.update(exp_avg=torch.ones(2, 8))),
        errors.OptimizerError,
    ),
    "a state of integers": (
        stepped(lambda _, state: state.update(exp_avg=torch.ones(8, 8).long())),
        errors.OptimizerError,
    ),
    "a state that is missing": (
        stepped(lambda _, state: state.pop("exp_avg")),
        errors.OptimizerError,
    ),
    "changed in between": (changed_in_between, errors.BackwardError),
    "an input changed in between": (changed_input, errors.BackwardError),
    "shared data": (shares_data, errors.ModelError),
    "eager": (lambda folder: mc.eager(net()).__enter__(), errors.ModelError),
    "checkpoint={}": (option(checkpoint={}), errors.OptionTypeError),
    "no folder": (
        lambda folder: megacompile(on_meta(), device="cpu", checkpoint=folder / "none"),
        errors.CheckpointError,
    ),
    "other shapes": (loaded(words=16), errors.CheckpointError),
    "missing": (loaded(layers=4), errors.CheckpointError),
    "unexpected": (loaded(layers=2), errors.CheckpointError),
    "fewer digits": (loaded(dtype=BF16), errors.CheckpointError),
    "truncated": (rewritten(lambda data: data[:-1]), errors.CheckpointError),
    "header": (rewritten(lambda data: data[:20]), errors.CheckpointError),
    "no header": (
        rewritten(lambda data: (16).to_bytes(8, "little") + b"{" * 100),
        errors.CheckpointError,
    ),
    "torch.save": (
        loaded(lambda plain, folder: torch.save({}, folder / "model.safetensors")),
        errors.CheckpointError,
    ),
    "other format": (
        loaded(lambda plain, folder: (folder / "model.safetensors").rename(folder / "a.bin")),
        errors.CheckpointError,
    ),
    "loaded twice": (
        lambda folder: megacompile(
            megacompile(saved_net(folder), device="cpu"), device="cpu", checkpoint=folder
        ),
        errors.OptionError,
    ),
    "saved from meta": (lambda folder: save(on_meta(), folder), errors.CheckpointError),
    "max_shard_size=0": (
        lambda folder: save(net(), folder, max_shard_size=0),
        errors.OptionError,
    ),
    "extra state": (extra_state, errors.CheckpointError),
}


def saved_net(folder: Path) -> Any:
    """A model whose checkpoint lies there."""
    model = Net()
    saved(model, folder)
    return model


SENTENCES: dict[str, str] = {
    "compute_dtype=float32": (
        "megacompile(): got compute_dtype=torch.float32; needed None or one of "
        "torch.bfloat16, torch.float16"
    ),
    "compute_dtype='bf16'": (
        "megacompile(): got compute_dtype='bf16'; needed None or one of torch.bfloat16, "
        "torch.float16"
    ),
    "compute_dtype=16": (
        "megacompile(): option 'compute_dtype' got 16 (int); needed None or one of "
        "torch.bfloat16, torch.float16"
    ),
    "grad_dtype=int8": (
        "megacompile(): got grad_dtype=torch.int8; needed None or one of torch.bfloat16, "
        "torch.float16, torch.float32"
    ),
    "grad_dtype=1.0": (
        "megacompile(): option 'grad_dtype' got 1.0 (float); needed None or one of "
        "torch.bfloat16, torch.float16, torch.float32"
    ),
    "state_dtype='int4'": (
        "megacompile(): got state_dtype='int4'; needed None or one of torch.float32, "
        "torch.bfloat16, 'int8'"
    ),
    "state_dtype=float64": (
        "megacompile(): got state_dtype=torch.float64; needed None or one of torch.float32, "
        "torch.bfloat16, 'int8'"
    ),
    "state_dtype=8": (
        "megacompile(): option 'state_dtype' got 8 (int); needed None or one of "
        "torch.float32, torch.bfloat16, 'int8'"
    ),
    "stochastic_rounding=1": (
        "megacompile(): option 'stochastic_rounding' got 1 (int); needed True or False"
    ),
    "device_update=1.1": ("megacompile(): got device_update=1.1; needed a number from 0 to 1"),
    "device_update=nan": ("megacompile(): got device_update=nan; needed a number from 0 to 1"),
    "device_update='all'": (
        "megacompile(): option 'device_update' got 'all' (str); needed None or a number from 0 to 1"
    ),
    "device_update, eager": (
        "megacompile(): got device_update=0.5 with lowering='eager', whose updates are "
        "torch.optim's own; leave it out, or use lowering='inductor'"
    ),
    "disk=3": ("megacompile(): option 'disk' got 3 (int); needed None or the path of a folder"),
    "disk, absent": (
        "megacompile(): got disk='/absent/folder'; needed a folder that this process can "
        "write to, on a local disk"
    ),
    "disk_memory alone": (
        "megacompile(): got disk_memory=1073741824 without disk=; needed the folder that it "
        "is about; name one, or leave disk_memory out"
    ),
    "disk_memory=-1": (
        'megacompile(): got disk_memory=-1; needed bytes (an int), a text such as "20GiB", or'
        " a fraction of what there is (0 < f <= 1)"
    ),
    "disk_weights alone": (
        "megacompile(): got disk_weights=True without disk=; needed the folder that they lie "
        "in; name one, or leave it out"
    ),
    "disk_weights=1": (
        "megacompile(): option 'disk_weights' got 1 (int); needed True, False or None"
    ),
    "disk_weights, masters": (
        "megacompile(): got disk_weights=True with compute_dtype=torch.bfloat16; masters do "
        "not go to a disk; leave that out, or leave it out"
    ),
    "disk_weights, device_update": (
        "megacompile(): got device_update=0.5 with disk_weights=True; the device would update"
        " parameters that are read from a disk; leave one of them out"
    ),
    "disk_saved alone": (
        "megacompile(): got disk_saved=True without disk=; needed the folder that they lie "
        "in; name one, or leave it out"
    ),
    "disk_saved, recompute": (
        "megacompile(): got disk_saved=True with activations='recompute'; only what waits on "
        "the host goes on to a disk; use activations='offload', or leave it out"
    ),
    "disk_saved=1": ("megacompile(): option 'disk_saved' got 1 (int); needed True, False or None"),
    "a small disk": (
        "disk_memory=64 KiB is too small: 32 KiB lie in FOLDER, and 36 KiB more are needed; "
        "raise disk_memory="
    ),
    "a disk too small for parameters": (
        "disk_memory=4 KiB is too small: 0 B lie in FOLDER, and 8 KiB more are needed; raise "
        "disk_memory="
    ),
    "no host memory": (
        "megacompile(): host_memory is 1 MiB; 0 B of it are taken, and what waits for its "
        "backward needs 2 MiB more; raise host_memory=, or need less: state_dtype='int8', a "
        "smaller batch, or disk="
    ),
    "optimizer=Adagrad": (
        "megacompile(): got optimizer=Adagrad; needed one that can update in the backward: "
        "AdamW, Adam, SGD or Lion; leave it out, and every optimizer works in "
        "optimizer.step()"
    ),
    "optimizer=3": (
        "megacompile(): option 'optimizer' got 3 (int); needed one that can update in the "
        "backward: AdamW, Adam, SGD or Lion"
    ),
    "differentiable": (
        "megacompile(): the optimizer is differentiable or capturable; needed one that is "
        "not, to update in the backward"
    ),
    "decoupled": (
        "megacompile(): got optimizer=Lion (decoupled_weight_decay=True divides by the lr "
        "that the optimizer began with); needed one that can update in the backward: AdamW, "
        "Adam, SGD or Lion; leave it out, and every optimizer works in optimizer.step()"
    ),
    "not in the optimizer": (
        "megacompile(): parameter 2.bias is not in the optimizer that updates in the "
        "backward; add it, or freeze it (requires_grad_(False))"
    ),
    "device_update, in the backward": (
        "megacompile(): got device_update=0.5 with optimizer=...; there every update is made "
        "in the backward; leave one of them out"
    ),
    "a gradient that is gone": (
        "p.grad of '0.weight' is not there: megacompile(model, optimizer=...) updates in the "
        "backward, and gradients never leave the device, so they cannot be read, clipped by "
        "their global norm or unscaled by a GradScaler; for those leave out optimizer=, or "
        "use megacompile.accumulate(model) around the backward, and clip micro-batches"
    ),
    "clipped too late": (
        "p.grad of '0.weight' cannot be multiplied by FACTOR: megacompile(model, "
        "optimizer=...) has made the update in the backward already, with the gradients as "
        "they were, so this step is not clipped; leave out optimizer= to clip by the global "
        "norm. clip_grad_norm_(parameters, inf) gives the norm alone (max_grad_norm=0 in a "
        "Trainer)"
    ),
    "a second backward": (
        "parameter '0.weight' was updated in a backward already, and gets another gradient "
        "before optimizer.step(): call step() after each backward, put all micro-batches but "
        "the last into `with megacompile.accumulate(model):`, or, where a graph break lets "
        "two captured graphs use one parameter, leave out optimizer="
    ),
    "a scaled loss": (
        "the loss of this backward was scaled by a GradScaler, but megacompile(model, "
        "optimizer=...) makes the update in the backward, before anybody could unscale the "
        "gradients (nothing was updated): leave out optimizer=, or the GradScaler, which "
        "bfloat16 does not need"
    ),
    "a hook": (
        "Sequential: the gradient of '2.weight' is wanted by a hook, or by "
        "backward(inputs=...), but gradients never leave the device where the backward "
        "updates; leave out optimizer= of megacompile(), or put this backward into `with "
        "megacompile.accumulate(model):`"
    ),
    "an option changed": (
        "optimizer.step(): a parameter group was changed between backward() and step() (lr: "
        "0.1 -> 0.5), but the update has been made in the backward; change it after step(), "
        "as lr schedulers do"
    ),
    "accumulate": (
        "accumulate(): Sequential was not megacompiled with optimizer=... or mesh=...; "
        "without them every backward accumulates, and there is nothing to mark"
    ),
    "lr": (
        "AdamW.step(): param_groups[0] has lr='0.1' (str); needed a number; nothing was "
        "updated: set optimizer.param_groups[0]['lr'], and call it again"
    ),
    "betas": (
        "AdamW.step(): param_groups[0] has betas=(0.9,) (tuple); needed two numbers of at "
        "least 0, below 1; nothing was updated: set optimizer.param_groups[0]['betas'], and "
        "call it again"
    ),
    "a state of another shape": (
        "AdamW.step(): the state 'exp_avg' of parameter '0.weight' has shape (2, 8); needed "
        "(8, 8); nothing was updated: load a checkpoint of this model and optimizer, or reset"
        " the state of this parameter: del optimizer.state[param]"
    ),
    "a state of integers": (
        "AdamW.step(): the state 'exp_avg' of parameter '0.weight' is torch.int64, "
        "torch.strided; needed a dense floating-point tensor; nothing was updated: load a "
        "checkpoint of this model and optimizer, or reset the state of this parameter: del "
        "optimizer.state[param]"
    ),
    "a state that is missing": (
        "AdamW.step(): the state 'exp_avg' of parameter '0.weight' is missing; nothing was "
        "updated: load a checkpoint of this model and optimizer, or reset the state of this "
        "parameter: del optimizer.state[param]"
    ),
    "changed in between": (
        "Sequential: parameter '2.weight' was changed in place between the forward and its "
        "backward; call backward() before optimizer.step()"
    ),
    "an input changed in between": (
        "Sequential: input x2 of shape (2, 8) was changed in place since the forward, whose "
        "backward needs it as it was; change a copy (.clone()), or call backward() before"
    ),
    "shared data": (
        "megacompile(): parameters Sequential.0.weight and Sequential.2.weight share memory "
        "through their .data; tie them by using one nn.Parameter in both places, or clone one"
    ),
    "eager": ("eager(): Sequential is not megacompiled; call model = megacompile(model) first"),
    "checkpoint={}": (
        "megacompile(): option 'checkpoint' got dict; needed a path (a folder of safetensors)"
        " or a megacompile.Checkpoint"
    ),
    "no folder": (
        "megacompile(): checkpoint FOLDER/none does not exist; needed a folder of safetensors"
        " (download it first), or one .safetensors file"
    ),
    "other shapes": (
        "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
        "  shapes (1): embed.weight got (32, 8), needed (16, 8)\n"
        "    build the model with the checkpoint's config"
    ),
    "missing": (
        "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
        "  missing (8): layers.3.norm.weight; layers.3.norm.bias; layers.3.norm.running_mean;"
        " layers.3.norm.running_var; layers.3.norm.num_batches_tracked; ...\n"
        "    initialize=(pattern, ...) of megacompile.Checkpoint gives them values at random;"
        " names=... translates names"
    ),
    "unexpected": (
        "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
        "  unexpected (8): layers.2.norm.num_batches_tracked; layers.2.down.weight; layers.2."
        "norm.bias; layers.2.norm.running_mean; layers.2.norm.running_var; ...\n"
        "    ignore=(pattern, ...) of megacompile.Checkpoint leaves them out; or build the mo"
        "del that they are of"
    ),
    "fewer digits": (
        "megacompile(): checkpoint FOLDER/checkpoint does not fit Net\n"
        "  dtypes (22): embed.weight got torch.float32, needed torch.bfloat16; layers.0.norm."
        "weight got torch.float32, needed torch.bfloat16; layers.0.norm.bias got torch.float3"
        "2, needed torch.bfloat16; layers.0.norm.running_mean got torch.float32, needed torch"
        ".bfloat16; layers.0.norm.running_var got torch.float32, needed torch.bfloat16; ...\n"
        "    model.to(dtype) before megacompile() costs nothing on meta; cast=True of megacom"
        "pile.Checkpoint rounds"
    ),
    "truncated": (
        "megacompile(): file FOLDER/checkpoint/model.safetensors is truncated: got 6735 "
        "bytes, needed 6736; save or download it again"
    ),
    "header": (
        "megacompile(): file FOLDER/checkpoint/model.safetensors is truncated or no "
        "safetensors file: got 20 bytes, needed 2040 for its header alone; save or download "
        "it again"
    ),
    "no header": (
        "megacompile(): file FOLDER/checkpoint/model.safetensors has a header that cannot be "
        "read (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "needed a safetensors file; save or download it again"
    ),
    "torch.save": (
        "megacompile(): file FOLDER/checkpoint/model.safetensors is one of torch.save(); "
        "needed safetensors; leave out checkpoint= and call "
        "model.load_state_dict(torch.load(...)) after megacompile()"
    ),
    "other format": (
        "megacompile(): folder FOLDER/checkpoint has no .safetensors file (it has a.bin); "
        "needed safetensors: save it with safetensors.torch.save_file, or with "
        "save_pretrained of transformers"
    ),
    "loaded twice": (
        "megacompile(): Net is megacompiled already, and has values; give checkpoint= in the "
        "first call, or use model.load_state_dict()"
    ),
    "saved from meta": (
        "save(): Net has tensors on the meta device, which have no values; needed a model in "
        "memory; save it after megacompile()"
    ),
    "max_shard_size=0": ("save(): got max_shard_size=0; needed at least 1 byte"),
    "extra state": (
        "save(): Extra._extra_state is dict; safetensors holds tensors alone; use "
        "torch.save(model.state_dict(), file)"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sentence(name: str, tmp_path: Path) -> None:
    provoke, error = REFUSED[name]
    with pytest.raises(error) as raised:
        provoke(tmp_path)
    assert type(raised.value) is error
    assert said(raised.value, tmp_path) == SENTENCES[name]


def said(error: BaseException, folder: Path) -> str:
    """The sentence, without the folder of this run."""
    text = str(error.args[-1] if isinstance(error, OSError) else error)
    return re.sub(r"\d\.\d+e-\d+", "FACTOR", text.replace(str(folder), "FOLDER"))
