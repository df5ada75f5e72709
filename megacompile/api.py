"""The public functions `megacompile()`, `save()` and `accumulate()`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat, log
from megacompile.beside import compile_pool
from megacompile.beside.process import processes
from megacompile.cost.rank_rates import agree, agree_disk, ranks_of_host, use_cores
from megacompile.errors import ModelError, OptionError
from megacompile.host_memory import budget_bytes, check_host_memory, free_bytes
from megacompile.option_checks import by_name
from megacompile.options import Activations, Head, Lowering, Options, check_alike
from megacompile.plan.setting import Setting
from megacompile.progress import line
from megacompile.runtime.checkpoint.contents import Checkpoint as Checkpoint
from megacompile.runtime.checkpoint.contents import Contents, on_meta
from megacompile.runtime.checkpoint.save import save as save
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.model.methods import ModuleCall, replace_methods
from megacompile.runtime.model.streamed import StreamedModel, refuse_nested, refuse_shared
from megacompile.text import format_bytes
from megacompile.validate import check_model, check_optimizer, held_bytes, host_rows

M = TypeVar("M", bound=nn.Module)


@by_name
def megacompile(
    model: M,
    *,
    device: torch.device | str | int | None = None,
    gpu_memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state_dtype: torch.dtype | str | None = None,
    compute_dtype: torch.dtype | None = None,
    activations: Activations | str = "auto",
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    mesh: DeviceMesh | None = None,
    lowering: Lowering | str | None = None,
    progress: bool | None = None,
    # for experts: docs/options.md
    resident: int | float | str = "auto",
    disk_memory: int | float | str | None = None,
    disk_weights: bool | None = None,
    disk_saved: bool | None = None,
    device_update: float | None = None,
    grad_dtype: torch.dtype | None = None,
    stochastic_rounding: bool = False,
    head: Head | str = "auto",
    tiles: int | str = "auto",
    dynamic: bool | None = None,
    lookahead: int = 2,
    slots: int | None = None,
    cuda_graphs: bool = True,
    detect_anomaly: bool = False,
) -> M:
    """Compile a model whose parameters and gradients stream between host and device memory.

    The model is changed in place and returned, with the same class, parameters and `state_dict`
    keys. Parameters stay `nn.Parameter`s, in host memory or, where they fit, in device memory.
    Optimizers, clipping, schedulers and checkpoints work unchanged. Calls compute on `device`.

    Start without options. Options from `resident` on are for experts; docs/options.md describes
    them in full and says when to set each.

    Args:
        model: an `nn.Module` with dense parameters. The result of `torch.compile()` is unwrapped:
            its inner module is compiled and returned.
        device: the device that computes. Default: the current CUDA device, else the CPU.
        gpu_memory: device memory that the plan may use: bytes, "20GiB" or a fraction of the
            device's. Default: the memory that is free when the plan is made, less 5 % of it (4 GiB
            at most). With `mesh`, all ranks plan with the smallest limit of any rank, for host
            memory too.
        host_memory: host memory for parameters, gradients, optimizer states and offloaded tensors,
            in the same forms. Default: the free memory less 4 % of it (6 GiB at most). The rest
            stays on the device or, with `disk`, goes there; if that is full too, `HostMemoryError`
            is raised.
        disk: a folder on a fast local disk for what host memory does not hold: optimizer states,
            then parameters, then tensors saved for the backward. They are in a scratch file that
            disappears with the process; each step reads and writes it. Without a plan (on the CPU),
            the optimizer states of all streamed buckets are there.
        optimizer: an AdamW, Adam, SGD or Lion whose update runs in the backward, stage by stage.
            Gradients never reach the host, and `optimizer.step()` only counts. Clipping by the
            global norm, `p.grad` and GradScaler do not work; `clip_grad_norm_(parameters, inf)`
            returns the norm. Put the backward of every micro-batch but the last into
            `with accumulate(model):`.
        state_dtype: the dtype of the optimizer's moments: torch.float32, torch.bfloat16 or "int8"
            (8 bits, blockwise). Default: the parameter's, as in torch.optim. Optimizers other than
            AdamW, Adam, SGD and Lion ignore it with a warning.
        compute_dtype: torch.bfloat16 or torch.float16: float32 parameters and floating-point inputs
            are cast to it. The host keeps float32 masters and streams the cast copy.
        activations: the tensors that are saved for the backward. "keep" keeps all of them on the
            device: fastest, most memory. "selective" keeps about half of them and recomputes the
            rest. "recompute" keeps only stage inputs and recomputes everything else, except in the
            last stage, whose backward comes next. "offload" does the same with stage inputs in host
            memory, so that device memory does not grow with the number of layers: for long
            contexts. "auto" (default) keeps as many stages as fit and shorten the step, and
            offloads if nothing else fits.
        checkpoint: a safetensors folder or file, read straight into the model's host memory, or a
            `megacompile.Checkpoint` with more settings. Default: the model's own values; parameters
            on meta are initialized at random on the CPU, by `_init_weights` of transformers, else
            by the modules' `reset_parameters()`.
        mesh: the ranks that share the model, one process each, started by `torchrun`:
            `init_device_mesh("cuda", (world_size,))`. Each rank has its rows of every parameter,
            gradient and state; gradients are means over ranks, as with FSDP2. Parameters become
            DTensors, which are new objects: create the optimizer afterwards (one that has not
            stepped gets the new ones). Of two dimensions, the first replicates and the second
            shards.
        lowering: "inductor" (default on CUDA) or "eager" (default on the CPU, bitwise equal to
            the plain model).
        progress: show progress bars and what the first step waits for. Default: if stderr is a
            terminal; otherwise one line is printed, once, if a part of the first step takes 5 s.
            With `mesh`, only the first rank shows them.
        resident: device memory for parameters that stay there: a size, 0, "all" or "auto".
        disk_memory: disk space that may be used in `disk`, in the forms of `gpu_memory`.
        disk_weights: all streamed buckets have their parameters in `disk` (True), or none (False).
        disk_saved: move tensors offloaded during a step on to `disk` (True), or none (False).
        device_update: the share (0 to 1) of parameters that `optimizer.step()` updates on `device`.
        grad_dtype: the dtype of `p.grad`. Default: the parameter's.
        stochastic_rounding: round updated bfloat16 parameters up or down at random.
        head: compute the last linear layer and its loss "chunked", "whole" or as "auto" decides.
        tiles: the number of tiles that tokens are divided into; 1 for none.
        dynamic: trace sizes as symbols from the start (True), never (False), or once they change.
        lookahead: how many stages ahead a bucket is prefetched.
        slots: device buffers for prefetched buckets, at least `lookahead + 1`.
        cuda_graphs: capture a model that fits as CUDA graphs, and replay them in each step.
        detect_anomaly: raise `AnomalyError` if a stage's backward returns NaN or inf.

    Raises:
        ModelError: `model` is not a module, its parameters cannot be streamed, or another
            megacompiled model has one of them.
        OptionError: an option is invalid, or differs from an earlier call's.
        DiskError: no file can be created in `disk`, or the parameters do not fit there.
        HostMemoryError: parameters (except those that may go to a disk) and gradients do not fit
            into host memory; or, at the first call, these with optimizer states and offloaded
            tensors.
        CheckpointError: the checkpoint is incomplete, does not fit the model, or cannot be read.
            The model is unchanged.
        MissingExtraError: `checkpoint` needs safetensors, which is not installed.

    Example::

        model = megacompile(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in data:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    given = {**locals()}  # the parameters: no other local exists yet
    del given["model"], given["checkpoint"]
    log.configure()
    options = Options.resolve(**given)
    if isinstance(model, nn.Module):
        model = cast("M", compat.without_torch_compile(model))
    if isinstance(model, nn.Module) and compat.compiled_call(model) is not None:
        return _make(model, options, checkpoint, None)  # only checks: nothing is compiled
    ranks = Ranks.that_share(options.mesh, options.device)
    if ranks is None:
        return _make(model, options, checkpoint, None)
    with ranks.together(f"megacompile() of {type(model).__name__}"):
        return _make(model, options, checkpoint, ranks)


def _make(
    model: M,
    options: Options,
    checkpoint: str | os.PathLike[str] | Checkpoint | None,
    ranks: Ranks | None,
) -> M:
    """Megacompile a model and return it. Ranks that share it raise together."""
    if _is_megacompiled(model, options, checkpoint):
        return model
    if ranks is not None:
        check_alike(ranks.all_gather_object(options.of_all_ranks))
    refuse_nested(model)
    refuse_shared(model)
    if options.optimizer is not None:
        check_optimizer(model, options.optimizer)
    # without a checkpoint, `mesh` refuses parameters on meta
    wanted = options.mesh is None or checkpoint is not None
    contents = _contents(model, checkpoint) if wanted else None
    device_bytes = 0  # for resident buckets
    if options.device.type == "cuda" and options.resident != 0:
        device_bytes = options.gpu_memory or compat.free_device_bytes(options.device)
    rows = host_rows(model, options, device_bytes)
    check_host_memory(rows, options.host_memory)
    # left for parameters after the rows that are needed in any case
    new_bytes = free_bytes(options.host_memory) - sum(size for _, size in rows)
    setting = _setting(model, options, ranks)
    if options.device.type == "cuda" and options.lowering is Lowering.INDUCTOR:
        compat.start_compile_workers()  # they start while parameters move
        compile_pool.start(options.device)
    try:
        with compat.on_host():
            streamed = StreamedModel(model, setting, contents, new_bytes)
    except BaseException:
        compile_pool.stop()
        raise
    compat.set_compiled_call(model, streamed)
    replace_methods(model, shared=options.mesh is not None)
    machine = streamed.machine
    layouts = [bucket.layout for bucket in machine.buckets.values()]
    log.buckets_placed(type(model).__name__, layouts)
    return model


def _is_megacompiled(
    model: nn.Module, options: Options, checkpoint: str | os.PathLike[str] | Checkpoint | None
) -> bool:
    """True if the model is already megacompiled with these options. Raises for other options, and
    for a model that cannot be megacompiled."""
    present = compat.compiled_call(model) if isinstance(model, nn.Module) else None
    if isinstance(present, ModuleCall):  # of another model: `refuse_shared` has a better error
        present = None
    shared = isinstance(present, StreamedModel) and present.options.mesh is not None
    check_model(model, meta=True, sharded=shared)
    if present is None:
        return False
    why = "is megacompiled already, "
    if not isinstance(present, StreamedModel):
        why = (
            "was compiled with model.compile() already; leave out that call: megacompile compiles "
            "the model"
        )
    elif present.options != options:
        why += "with other options; call it once, with the options you want"
    elif checkpoint is not None:
        why += "and has values; pass checkpoint= in the first call, or use model.load_state_dict()"
    else:
        return True
    raise OptionError(f"megacompile(): {type(model).__name__} {why}")


def _setting(model: nn.Module, options: Options, ranks: Ranks | None) -> Setting:
    """The options and this machine's memory, for plans; with ranks, also their agreed rates and
    memory."""
    cuda = options.device.type == "cuda"
    share = 1 if ranks is None or not cuda else ranks_of_host(ranks.mesh)
    host_bytes = None
    if cuda:
        beside = processes(options)
        size = sum(size for _, size in beside)
        host_bytes = budget_bytes(held_bytes(model), share=share, beside_bytes=size)
        left = "; ".join(f"{format_bytes(size)} for {what}" for what, size in beside) or "none"
        text = "%s: host memory budget %s; reserved for other processes: %s"
        names = type(model).__name__, format_bytes(host_bytes), left
        log.logger("memory").info(text, *names)
    if ranks is None:
        return Setting(options, host_bytes=host_bytes)
    gather = ranks.all_gather_object
    use_cores(ranks.mesh, gather)
    with line("", options.progress):  # shows what is measured
        disk = agree_disk(ranks.mesh, options.disk, gather, measured=cuda)
        agreed = agree(ranks.mesh, options.device, gather, disk) if cuda else None
    disk_bytes = None if disk is None else disk.share_bytes
    if not all(ranks.all_gather_object(options.plans)):
        return Setting(options, None, host_bytes, agreed, disk_bytes)
    each = ranks.all_gather_object((options.host_memory, host_bytes))
    least_bytes = min((size for both in each for size in both if size), default=None)
    return Setting(options, None, least_bytes, agreed, disk_bytes, lambda size: min(gather(size)))


def _contents(
    model: nn.Module, checkpoint: str | os.PathLike[str] | Checkpoint | None
) -> Contents | None:
    """The values to load or initialize; None if the model has its own."""
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike, Checkpoint)):
        raise OptionError(
            f"megacompile(): got a {type(checkpoint).__name__} as checkpoint=; needed a path (a "
            "folder of safetensors) or a megacompile.Checkpoint; call load_state_dict() for a "
            "state dict"
        )
    if checkpoint is None and not on_meta(model):
        return None
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = Checkpoint(checkpoint)
    with compat.on_host():
        return Contents(model, checkpoint)


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Mark the backward of a micro-batch that is not the last, with `optimizer=` or `mesh=`.

    With `optimizer=`, its gradients accumulate on the host or, for resident layers, on the device,
    as they do without `optimizer=`. The next backward outside of `accumulate` adds them and
    updates; if none follows, `optimizer.step()` updates.

    With a mesh of two dimensions, its gradients are summed over the ranks that shard, but not over
    replicas. The next backward outside of `accumulate` sums all of them. Until then `p.grad` is
    incomplete: reading it, clipping it and `optimizer.step()` raise `OptimizerError`; `zero_grad()`
    works. A graph whose gradients autograd adds to (a hook, a parameter that is used outside of the
    model) is summed in each backward. With a mesh of one dimension and no `optimizer=`, the mark
    has no effect.

    Loops of Accelerate, Trainer and TRL need no mark: Accelerate records which micro-batch is the
    last.

    Raises:
        ModelError: the model was not megacompiled with `optimizer=` or `mesh=`.

    Example::

        for k, (x, y) in enumerate(micro_batches):
            last = k + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accumulate(model):
                (model(x, y) / len(micro_batches)).backward()
        optimizer.step()
    """
    streamed = compat.compiled_call(model)
    machine = streamed.machine if isinstance(streamed, StreamedModel) else None
    if machine is None or (machine.in_backward is None and machine.ranks is None):
        raise ModelError(
            f"accumulate(): {type(model).__name__} was not megacompiled with optimizer=... or "
            "mesh=...; without them every backward accumulates, and no mark is needed"
        )
    before, machine.accumulating = machine.accumulating, True
    try:
        yield
    finally:
        machine.accumulating = before
