"""One system at one setting, in this process: seconds a step, memory, losses.

Steps are timed together, from idle to idle: nothing waits between them, and the update of the last
one has ended. Host memory is the most that the process had in RAM during those steps, less what it
had before the model was there. Compilers that run in other processes are not counted.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import parameters
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.outcome import Outcome, Status, one_line
from benchmarks.peers.system import RefusedError, System
from benchmarks.peers.work import Setting, batch, build
from benchmarks.process_memory import status_bytes

Say = Callable[[str], None]  # is told what is being done


def outcome(peer: Peer, setting: Setting, device: str, warm: int, steps: int, say: Say) -> Outcome:
    """Measure, and turn every error into a reason."""
    try:
        package = version_of(peer)
    except metadata.PackageNotFoundError:
        return Outcome(Status.NOT_INSTALLED, f"no package {peer.package}")
    try:
        check(peer, setting, device, package)
        result = measure(peer, setting, device, warm, steps, say)
    except Exception as error:
        status, reason = reason_of(error, setting, device)
        return Outcome(status, reason, package=package)
    return Outcome(Status.OK, result=result, package=package)


def version_of(peer: Peer) -> str:
    """ "deepspeed 0.19.8".

    Raises:
        PackageNotFoundError: it is not installed.
    """
    if peer.package == "torch":
        return f"torch {torch.__version__}"
    if peer.package == "megacompile":
        return "megacompile"  # the commit is the run's
    return f"{peer.package} {metadata.version(peer.package)}"


def check(peer: Peer, setting: Setting, device: str, package: str) -> None:
    """Raise `RefusedError` where a system cannot do this."""
    have = tuple(int(part) for part in package.split(" ")[-1].split(".")[:2] if part.isdigit())
    if any(peer.minimum) and have < peer.minimum:
        needed = ".".join(map(str, peer.minimum))
        raise RefusedError(f"got {package}, needed {needed} or newer")
    if peer.needs_gpu and device == "cpu":
        raise RefusedError("needs a CUDA device")
    if setting.cap_gib is not None and device == "cpu":
        raise RefusedError("a limit of GPU memory needs a CUDA device")


def measure(
    peer: Peer, setting: Setting, device: str, warm: int, steps: int, say: Say
) -> dict[str, Any]:
    """Train for a few steps; gives what a result has.

    Args:
        peer: who trains.
        setting: what is trained.
        device: "cuda" or "cpu".
        warm: steps between the first one and those that are timed.
        steps: that are timed.
        say: is told what is being done.
    """
    before = status_bytes("VmRSS")
    say("builds the model")
    model = build(setting, device, masters=peer.masters)
    count = parameters(model)
    ids = batch(setting, device)
    cap(setting, device)
    say("sets up")
    start = time.perf_counter()
    name, _, function = peer.setup.partition(":")
    system: System = getattr(importlib.import_module(name), function)(model, device, **peer.options)
    del model
    say("takes its first step")
    losses = [float(system.step(ids))]
    first_s = time.perf_counter() - start
    for k in range(warm):
        say(f"warms up, step {k + 1} of {warm}")
        losses.append(float(system.step(ids)))
        if k == 0:
            system.warmed()
    system.finish()
    gc.collect()
    setup_peak = status_bytes("VmHWM")
    forget_peaks(device)
    say(f"is timed, {steps} steps")
    synchronize(device)
    start = time.perf_counter()
    timed = [system.step(ids) for _ in range(steps)]
    system.finish()
    synchronize(device)
    step_s = (time.perf_counter() - start) / steps
    peak = status_bytes("VmHWM")
    losses += [float(loss) for loss in timed]
    say("is done")
    return {
        "parameters": count,
        "step_s": step_s,
        "first_step_s": first_s,
        "losses": losses,
        "host_bytes": peak - before,
        "host_setup_bytes": max(peak, setup_peak) - before,
        **gpu_bytes(device),
        "notes": system.notes(),
    }


def cap(setting: Setting, device: str) -> None:
    """Limit the GPU memory of this process from here on."""
    if setting.cap_gib is None or device == "cpu":
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, setting.cap_gib * 2**30 / total))


def forget_peaks(device: str) -> None:
    """Peaks count from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # a container may forbid it: then the setup's peak counts
        Path("/proc/self/clear_refs").write_text("5")


def gpu_bytes(device: str) -> dict[str, int]:
    """The most that tensors took, and that the allocator held, since `forget_peaks`."""
    if device == "cpu":
        return {}
    return {
        "gpu_bytes": torch.cuda.max_memory_allocated(),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def reason_of(error: Exception, setting: Setting, device: str) -> tuple[Status, str]:
    """Classify an error; returns one line of it too."""
    text = one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, RefusedError):
        return Status.REFUSED, one_line(str(error))
    if "DeviceMemoryError" in type(error).__name__:
        return Status.OUT_OF_MEMORY, text
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text.lower():
        return Status.OUT_OF_MEMORY, f"{text}; {_held(setting, device)}"
    if isinstance(error, ImportError):
        return Status.NOT_INSTALLED, text
    return Status.CRASHED, text


def _held(setting: Setting, device: str) -> str:
    host = f"the process had {status_bytes('VmHWM') / 2**30:.1f} GiB of host memory at most"
    if device == "cpu":
        return host
    limit = "" if setting.cap_gib is None else f" of {setting.cap_gib:g}"
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}{limit} GiB of GPU memory; {host}"
