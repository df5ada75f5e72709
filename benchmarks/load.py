"""A checkpoint of 14.8 B parameters from files to a model that is ready to train.

    python -m benchmarks.load                              # 48 layers, 27.5 GiB of files
    python -m benchmarks.load --save --compare             # and back; and the usual way
    python -m benchmarks.load --layers 2 --width 512       # a trial

The files are random bytes in Hugging Face's layout, written once and read once before (`warm`), so
that the page cache has them; `--cold` takes them out of it. Each measurement has a process of its
own. Memory is that of the process beyond the page cache: anonymous and shared, sampled every 10 ms.
Steady is what is there when `megacompile()` has returned, peak the most until then, both less what
was there before it (torch, CUDA, transformers). Locking is part of reading: the main thread locks
a bucket while others are read.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import parameters, qwen2
from benchmarks.report import publish
from megacompile.host_memory import in_ram_bytes

_SHARD_BYTES = 5 * 10**9


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir(), "megacompile-load")))
    parser.add_argument("--repeats", type=int, default=2, help="of loading; default: 2")
    parser.add_argument("--cold", action="store_true", help="load from the disk too")
    parser.add_argument("--save", action="store_true", help="save too, into FOLDER-saved")
    parser.add_argument("--compare", action="store_true", help="from_pretrained, then megacompile")
    parser.add_argument("--random", action="store_true", help="random initialization too")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--out", help="write the table here")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what a child measures
    args = parser.parse_args(argv)
    if args.only:
        print(json.dumps(_CHILDREN[args.only](args)))
        return []
    folder = Path(args.folder)
    rows: list[dict[str, object]] = [_written(args, folder)]
    try:
        rows += [_warmed(folder), *(_child("load", args) for _ in range(args.repeats))]
        if args.compare:
            rows.append(_child("compare", args))
        if args.save:
            rows.append(_child("save", args))
        if args.random:
            rows.append(_child("random", args))
        if args.cold:
            _cool(folder)
            rows.append({**_child("load", args), "what": "load, cold"})
    finally:
        shutil.rmtree(f"{folder}-saved", ignore_errors=True)
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    publish("Loading", rows, args.out)
    return rows


def _model(args: argparse.Namespace) -> nn.Module:
    """A model of Qwen2.5-14B's shape, on meta."""
    width = args.width
    intermediate = 13824 if width == 5120 else 2 * width
    heads = 8 if width == 5120 else 1
    return qwen2(args.layers, device="meta", width=width, intermediate=intermediate, kv_heads=heads)


# --- the files


def _written(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Random bytes under the model's names, sharded, with an index."""
    from safetensors.torch import save_file

    model = _model(args)
    tensors = {name: param for name, param in model.named_parameters()}
    total = sum(_size(tensor) for tensor in tensors.values())
    index = folder / "model.safetensors.index.json"
    start = time.perf_counter()
    if not index.exists() or json.loads(index.read_text())["metadata"]["total_size"] != total:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        largest = max(_size(tensor) for tensor in tensors.values())
        noise = torch.randint(-(2**31), 2**31 - 1, (-(-largest // 4),), dtype=torch.int32)
        shards = list(_shards(tensors))
        places = {}
        for k, names in enumerate(shards, 1):
            file = f"model-{k:05}-of-{len(shards):05}.safetensors"
            places.update(dict.fromkeys(names, file))
            made = {n: _cut(noise, tensors[n], at) for at, n in enumerate(names)}
            save_file(made, folder / file, metadata={"format": "pt"})
            print(f"wrote {file}, {time.perf_counter() - start:.1f} s", flush=True)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
        getattr(model.config, "save_pretrained")(folder)  # noqa: B009
    seconds = time.perf_counter() - start
    return {
        "what": f"write the files: {parameters(model) / 1e9:.2f} B parameters",
        "s": f"{seconds:.1f}",
        "GiB": f"{total / 2**30:.1f}",
    }


def _cut(noise: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
    """A tensor of noise, with memory of its own; neighbours begin elsewhere in it."""
    flat = noise.view(torch.bfloat16)
    first = min(at * 64, flat.numel() - like.numel())
    return flat[first : first + like.numel()].view(like.shape).clone()


def _shards(tensors: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + _size(tensor) > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _size(tensor)
    yield names


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _warmed(folder: Path) -> dict[str, object]:
    """Read every file once, on all cores."""
    start = time.perf_counter()
    piece = 64 * 2**20

    def read(place: tuple[Path, int]) -> int:
        with place[0].open("rb", buffering=0) as file:
            file.seek(place[1])
            return len(file.read(piece))

    places = [
        (file, at)
        for file in sorted(folder.glob("*.safetensors"))
        for at in range(0, file.stat().st_size, piece)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        total = sum(pool.map(read, places))
    seconds = time.perf_counter() - start
    return {"what": "read the files into nothing", "s": f"{seconds:.1f}", **_rate(total, seconds)}


def _cool(folder: Path) -> None:
    """Take the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- what is measured, each in a process of its own


def _child(what: str, args: argparse.Namespace) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.load", "--only", what, "--folder", args.folder]
    command += ["--layers", str(args.layers), "--width", str(args.width)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        return {"what": what, "s": f"failed: exit status {done.returncode}"}
    row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def _load(args: argparse.Namespace) -> dict[str, object]:
    from megacompile import megacompile

    model = _model(args)
    with _Memory() as memory, _parts() as parts:
        start = time.perf_counter()
        megacompile(model, checkpoint=args.folder, progress=False)
        seconds = time.perf_counter() - start
    _check(model, Path(args.folder))
    return {"what": "load", **_seconds(model, seconds), **parts, **memory.row()}


def _compare(args: argparse.Namespace) -> dict[str, object]:
    from transformers import AutoModelForCausalLM

    from megacompile import megacompile

    with _Memory() as memory:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16)
        made = time.perf_counter() - start
        megacompile(model, progress=False)
        seconds = time.perf_counter() - start
    parts = {"from_pretrained s": f"{made:.1f}"}
    return {"what": "from_pretrained", **_seconds(model, seconds), **parts, **memory.row()}


def _save(args: argparse.Namespace) -> dict[str, object]:
    import megacompile

    model = megacompile.megacompile(_model(args), checkpoint=args.folder, progress=False)
    with _Memory() as memory:
        start = time.perf_counter()
        megacompile.save(model, f"{args.folder}-saved")
        seconds = time.perf_counter() - start
    peak = memory.row()["peak GiB"]
    return {"what": "save", **_seconds(model, seconds), "peak GiB": peak}


def _random(args: argparse.Namespace) -> dict[str, object]:
    from megacompile import megacompile

    model = _model(args)
    with _Memory() as memory:
        start = time.perf_counter()
        megacompile(model, progress=False)
        seconds = time.perf_counter() - start
    return {"what": "random initialization", **_seconds(model, seconds), **memory.row()}


_CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
    "load": _load,
    "compare": _compare,
    "save": _save,
    "random": _random,
}


def _check(model: nn.Module, folder: Path) -> None:
    """The first and the last tensor are those of the files."""
    from safetensors import safe_open

    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    named = dict(model.named_parameters())
    for name in (*list(named)[:2], *list(named)[-2:]):
        with safe_open(folder / places[name], framework="pt") as file:
            stored = file.get_tensor(name)
        if not torch.equal(stored.view(torch.int16), named[name].detach().view(torch.int16)):
            raise SystemExit(f"{name} is not what the file has")


def _seconds(model: nn.Module, seconds: float) -> dict[str, object]:
    total = sum(_size(param) for param in model.parameters())
    return {"s": f"{seconds:.1f}", **_rate(total, seconds)}


def _rate(size_bytes: int, seconds: float) -> dict[str, object]:
    return {"GiB": f"{size_bytes / 2**30:.1f}", "GiB/s": f"{size_bytes / 2**30 / seconds:.1f}"}


@contextmanager
def _parts() -> Iterator[dict[str, object]]:
    """Seconds that the main thread spends in parts of a load."""
    from megacompile.runtime.checkpoint import contents
    from megacompile.runtime.device.buffers import HostBuffer

    taken = {"match s": 0.0, "fill s": 0.0, "of it lock s": 0.0}
    undo: list[Callable[[], None]] = []

    def timed(owner: Any, name: str, part: str) -> None:
        stock = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                taken[part] += time.perf_counter() - start

        setattr(owner, name, call)
        undo.append(lambda: setattr(owner, name, stock))

    if torch.cuda.is_available():
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    timed(contents, "match", "match s")
    timed(contents.Contents, "fill", "fill s")
    timed(HostBuffer, "lock", "of it lock s")
    row: dict[str, object] = {}
    try:
        yield row
    finally:
        for back in undo:
            back()
        row.update({part: f"{seconds:.1f}" for part, seconds in taken.items()})


class _Memory:
    """The process's memory beyond the page cache, while its block runs."""

    def __enter__(self) -> _Memory:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
        gc.collect()
        self.before = self.peak = in_ram_bytes()
        self.steady = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, in_ram_bytes())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        gc.collect()
        self.steady = in_ram_bytes()
        self.peak = max(self.peak, self.steady)

    def row(self) -> dict[str, object]:
        """The table's cells."""
        steady, peak = self.steady - self.before, self.peak - self.before
        return {
            "steady GiB": f"{steady / 2**30:.2f}",
            "peak GiB": f"{peak / 2**30:.2f}",
            "peak / steady": f"{peak / max(steady, 1):.3f}",
        }


if __name__ == "__main__":
    main()
