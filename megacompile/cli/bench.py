"""The command `bench`: how fast standard models train on this machine.

Each case runs in a process of its own (`main`), so a case that runs out of memory costs nothing but
its line. A case of ours is planned on the meta device first, so nothing that cannot fit is built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile import api, inspection
from megacompile.cost.rates import load
from megacompile.errors import (
    DeviceMemoryError,
    HostMemoryError,
    MegacompileError,
    MissingExtraError,
)
from megacompile.host_memory import available_bytes, total_bytes
from megacompile.options import Options
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.progress import tell
from megacompile.runtime.updates.compiled import wait_until_compiled
from megacompile.text import duration, format_bytes

_STEPS = 6  # timed
_WARM_UP = 3  # steps before them
_PATIENCE_S = 120.0  # a case is not begun with less time left
_TOO_LARGE = "it does not fit"


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Qwen2.5's shape."""

    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151936
    tied: bool = True


MODELS = {  # the largest first
    "7.6B": Shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "3.1B": Shape(2048, 11008, 36, 16, 2),
    "1.5B": Shape(1536, 8960, 28, 12, 2),
    "0.5B": Shape(896, 4864, 24, 14, 2),
    "tiny": Shape(128, 256, 2, 2, 1, 512),  # to try the command
}
MODES: dict[str, dict[str, Any] | None] = {  # the options of ours; None: without megacompile
    "planned": {},
    "streamed": {"resident": 0, "activations": "recompute"},
    "backward": {"state_dtype": "int8"},  # the update in the backward
    "plain": None,
    "torch.compile": None,
}


def bench(args: argparse.Namespace) -> int:
    """Run every mode with the largest model that fits, and print a line for each."""
    device = Options.resolve(device=args.device).device
    tell(f"bench on {device}; no case begins after {args.minutes} minutes")
    _build(MODELS["tiny"], "meta")  # without transformers it raises here, not in each case
    until_s = time.monotonic() + 60 * args.minutes
    found: list[dict[str, Any]] = []
    if not args.json:
        print(_machine(device), flush=True)
    for mode in args.modes or MODES:
        result: dict[str, Any] = {}
        for name in args.models or [name for name in MODELS if name != "tiny"]:
            left_s = until_s - time.monotonic()
            if left_s < _PATIENCE_S and found:
                print(f"{mode}: no time left (--minutes {args.minutes})", file=sys.stderr)
                result = {}
                break
            tell(f"{name}, {mode}: plan, compile, {_WARM_UP + _STEPS} steps ...")
            result = _in_process(mode, name, args, str(device), left_s)
            if result.get("error") != _TOO_LARGE:  # it ran, or failed otherwise
                break
        if result:
            found.append(result)
            if not args.json:
                print(_line(result), flush=True)
    if args.json:
        print(json.dumps(found, indent=2))
    return 0 if any("error" not in result for result in found) else 1


def _machine(device: torch.device) -> str:
    parts = [f"torch {torch.__version__}", f"{format_bytes(total_bytes())} of host memory"]
    if device.type == "cuda":
        rates = load(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        parts.insert(0, f"{rates.name}, {format_bytes(memory)}")
        parts.append(
            f"link {rates.h2d_gb_s:.3g} GB/s, host memory {rates.host_memory_gb_s:.3g} GB/s"
        )
    return "; ".join(parts)


def _in_process(
    mode: str, name: str, args: argparse.Namespace, device: str, left_s: float
) -> dict[str, Any]:
    """The result of one case; "error": `_TOO_LARGE` if the model does not fit."""
    case = {"mode": mode, "model": name, "tokens": f"{args.batch}x{args.seq}"}
    request = json.dumps([mode, name, args.batch, args.seq, device])
    command = [sys.executable, "-m", __name__, request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, left_s))
    except subprocess.TimeoutExpired:
        return {**case, "error": f"it was not done after {left_s:.0f} s"}
    if done.returncode == -9:  # as the system ends processes when memory runs out
        return {**case, "error": _TOO_LARGE}
    lines = done.stdout.splitlines()
    try:
        return {**case, **json.loads(lines[-1])}
    except (IndexError, json.JSONDecodeError):
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {**case, "error": why}


def _line(result: dict[str, Any]) -> str:
    head = f"{result['model']}, {result['mode']}, {result['tokens']}: "
    if "error" in result:
        return f"{head}{result['error']}"
    predicted = result["predicted_s"]
    told = "" if predicted is None else f" ({duration(predicted)} predicted)"
    sizes = (f"{tier} {format_bytes(size)}" for tier, size in result["peak_bytes"].items())
    return (
        f"{head}{duration(result['step_s'])} a step{told}, {result['tokens_s']:,.0f} tokens/s, "
        f"{result['tflop_s']:.3g} TFLOP/s; peak {', '.join(sizes) or 'unknown'}; first step "
        f"{duration(result['first_s'])}"
    )


# In the process of one case.


def main(request: str) -> None:
    """Run a case and print its result as JSON."""
    mode, name, batch, seq, device = json.loads(request)
    try:
        result = _run(mode, MODELS[name], batch, seq, torch.device(device))
    except (DeviceMemoryError, HostMemoryError, torch.OutOfMemoryError):
        result = {"error": _TOO_LARGE}
    except MegacompileError as error:
        result = {"error": str(error).splitlines()[0]}
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # of the CPU's allocator
            raise
        result = {"error": _TOO_LARGE}
    print(json.dumps(result))


def _run(mode: str, shape: Shape, batch: int, seq: int, device: torch.device) -> dict[str, Any]:
    options = MODES[mode]
    torch.manual_seed(0)
    ids = torch.randint(shape.vocabulary, (batch, seq))
    if options is not None and device.type == "cuda":
        _plan(mode, shape, ids, device)
    model = _build(shape, "cpu" if options is not None else str(device))
    params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if options is not None:
        given = {**options, "optimizer": optimizer} if mode == "backward" else options
        model = api.megacompile(model, device=device, progress=False, **given)
        inspection.metrics(model)
    else:
        ids = ids.to(device)
        model = torch.compile(model) if mode == "torch.compile" else model  # type: ignore[assignment]

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    start = time.perf_counter()
    step().item()
    first_s = time.perf_counter() - start
    for _ in range(_WARM_UP - 1):
        step().item()
        wait_until_compiled()
    start = time.perf_counter()  # the last update is left over, as one was at the start
    for _ in range(_STEPS):
        last = step()
    loss = last.item()
    step_s = (time.perf_counter() - start) / _STEPS
    found: dict[str, Any] = {"step_s": step_s, "first_s": first_s, "loss": loss}
    found |= {"tokens_s": ids.numel() / step_s, "tflop_s": 6e-12 * params * ids.numel() / step_s}
    if options is not None:
        ours = inspection.metrics(model)
        peaks = {tier: use.peak_bytes for tier, use in ours.memory.items()}
        return {**found, "predicted_s": ours.predicted_s, "peak_bytes": peaks}
    peaks = {"device": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {**found, "predicted_s": None, "peak_bytes": peaks}


def _plan(mode: str, shape: Shape, ids: Tensor, device: torch.device) -> None:
    """Raise a DeviceMemoryError or HostMemoryError if no plan fits this machine."""
    model = _build(shape, "meta")
    options = dict(MODES[mode] or {})
    if mode == "backward":
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    hardware = load(device).replace(host_bytes=available_bytes())
    inputs = {"input_ids": ids, "labels": ids}
    given = abstract_options(**options)
    for program in abstract_programs(model, (), inputs, options=given, hardware=hardware):
        program.schedule()


def _build(shape: Shape, device: str) -> nn.Module:
    """A model with random weights."""
    try:
        from transformers import AutoModelForCausalLM, Qwen2Config
    except ImportError:
        raise MissingExtraError("bench needs transformers: pip install transformers") from None
    config = Qwen2Config(
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if device != "meta":
        model.to_empty(device=device).tie_weights()  # each of two tied ones was made
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        _write(model)
    made: nn.Module = model.train()
    return made


@torch.no_grad()
def _write(model: nn.Module) -> None:
    """Fill the parameters: norms with 1, biases with 0, weights with the same noise again and
    again, which is as good for a benchmark and takes seconds."""
    noise = torch.randn(2**22).mul_(0.02)
    for name, param in model.named_parameters():
        if param.ndim == 1:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            for part in param.view(-1).split(noise.numel()):
                part.copy_(noise[: part.numel()])


if __name__ == "__main__":
    main(sys.argv[1])
