"""Checks of a model, before `megacompile()` changes anything."""

from __future__ import annotations

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError, OptionError
from megacompile.options import Options
from megacompile.packed import leaves, packed_parameters


def check_model(model: object, *, meta: bool = False, sharded: bool = False) -> None:
    """Raise `ModelError` if a model cannot be streamed. `meta`: parameters may be on meta, because
    they will get values. `sharded`: they may be DTensors, because several ranks share the model."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"megacompile(): got {type(model).__name__}; needed a torch.nn.Module "
            "(for a function, wrap it in a module that owns the parameters)"
        )
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"megacompile(): {name} is a TorchScript module, which cannot be captured; "
            "needed the Python module that it was made from"
        )
    params = dict(model.named_parameters())
    if not params:
        raise ModelError(
            f"megacompile(): {name} has no parameters; needed at least one to stream; call a lazy "
            "module once first"
        )
    packed = {id(param) for _, _, param in packed_parameters(model)}
    for param_name, param in params.items():
        if id(param) in packed and param.requires_grad:
            raise ModelError(
                f"megacompile(): parameter {name}.{param_name} is a {type(param).__name__} that "
                "requires grad; needed a frozen one, because quantized data have no gradients; use "
                "requires_grad_(False) and train adapters (LoRA)"
            )
    parts = {id(leaf.tensor): leaf for leaf in reversed(list(leaves(model)))}  # by first names
    for leaf in reversed(parts.values()):
        part = compat.local(leaf.tensor) if sharded else leaf.tensor
        _check_parameter(f"{name}.{leaf.name}", part, meta=meta)
    _refuse_shared_memory(name, {p.name: compat.local(p.tensor) for p in parts.values()})
    for module_name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"megacompile(): {name}.{module_name} has sparse=True, whose gradients are sparse "
                "tensors; needed dense ones; set sparse=False"
            )


def _check_parameter(name: str, param: torch.Tensor, *, meta: bool) -> None:
    where = f"megacompile(): parameter {name}"
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ModelError(f"{where} is not initialized yet; call the model once first")
    if param.device.type == "meta" and not meta:
        raise ModelError(
            f"{where} moved to the meta device after megacompile(), and has no data; call "
            "model.to_empty(device='cpu'), then initialize or load it"
        )
    if param.is_meta and (compat.gradient_hooks(param) or compat.post_accumulate_hooks(param)):
        raise ModelError(
            f"{where} is on the meta device and has hooks, which would be lost when it gets "
            "memory; register them after megacompile()"
        )
    if param.layout is not torch.strided:
        raise ModelError(f"{where} has layout {param.layout}; needed a dense one; use .to_dense()")
    if param.is_quantized or type(param.data) is not torch.Tensor:
        kind = "quantized" if param.is_quantized else type(param.data).__name__
        raise ModelError(
            f"{where} is {kind}; needed an ordinary dense tensor, or a quantized one of torchao or "
            "bitsandbytes; call megacompile() before quantizing, or dequantize it; for a DTensor, "
            "use param.full_tensor() and mesh="
        )


def _refuse_shared_memory(model: str, params: dict[str, torch.Tensor]) -> None:
    """Raise if parameters share memory: in buckets each would get its own."""
    spans = []
    for name, param in params.items():
        each = zip(param.shape, param.stride(), strict=True)
        is_dense = 1 + sum((size - 1) * step for size, step in each) == param.numel()
        if is_dense and not param.is_meta:  # slices of one tensor may interleave
            spans.append((param.data_ptr(), param.nbytes, name))
    spans.sort()
    for (start, size_bytes, name), (other_start, _, other) in zip(spans, spans[1:], strict=False):
        if size_bytes and other_start < start + size_bytes:
            raise ModelError(
                f"megacompile(): parameters {model}.{name} and {model}.{other} share memory "
                "through their .data; tie them by using one nn.Parameter in both places, or "
                "clone one"
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer cannot update all of a model's parameters in the backward."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, param in model.named_parameters():
        group = groups.get(id(param))
        if param.requires_grad and group is None:
            raise OptionError(
                f"megacompile(): parameter {name} is not in the optimizer that updates in the "
                "backward; add it, or freeze it (requires_grad_(False))"
            )
        if group is not None and (group.get("differentiable") or group.get("capturable")):
            raise OptionError(
                "megacompile(): the optimizer is differentiable or capturable; needed one without "
                "these flags, to update in the backward"
            )
        if param.requires_grad and param.is_complex():
            raise OptionError(
                f"megacompile(): parameter {name} is complex, which the update in the backward "
                "does not support; leave out optimizer=, and optimizer.step() updates it"
            )


def host_rows(model: nn.Module, options: Options, device_bytes: int) -> list[tuple[str, int]]:
    """Rows of (what, bytes) of host memory that `megacompile()` needs beyond the model's own, in
    one rank. `device_bytes`: for resident buckets with their gradients."""
    on_disk = bool(options.disk_weights) or options.may_store_weights
    gradients = options.optimizer is None
    sizes = [(tensor, -(-size // options.ranks)) for tensor, size in _sizes(model)]
    moved = [n for leaf, n in sizes if leaf.device.type != "cpu" and not on_disk]
    trained = sum(size for leaf, size in sizes if leaf.requires_grad and gradients)
    return [
        ("parameters to move to the host", sum(moved)),
        ("one bucket, while moving", max(size for _, size in sizes)),
        ("gradients", max(0, trained - device_bytes)),
    ]


def held_bytes(model: nn.Module) -> int:
    """Host memory of a model's parameters."""
    return sum(size for leaf, size in _sizes(model) if leaf.device.type == "cpu")


def _sizes(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Each leaf of a model once, with its bytes."""
    tensors = {id(leaf.tensor): leaf.tensor for leaf in leaves(model)}.values()
    return [(tensor, tensor.numel() * tensor.dtype.itemsize) for tensor in tensors]
