"""Reads and writes of a scratch file, by ways that there are: rates, and the time of the CPU.

    python -m benchmarks.disk FOLDER            # 1 GiB, best of 3
    python -m benchmarks.disk FOLDER --gib 4
    python -m benchmarks.disk FOLDER --only "4 threads" --only kvikio

Threads are ours (`runtime/disk.py`), by chunk and number. io_uring needs `liburing` of
PyPI, kvikio `kvikio-cu13` (and its libraries on LD_LIBRARY_PATH, where there is no conda, and a
CUDA driver); a row says why one did not run. libaio is its system calls. All of them do direct I/O
of the same places and the same memory, but for "cached" and "mapping". CPU is user and system time
of this process. "Beside Python": while another thread runs Python code, and has the GIL whenever it
can.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.report import publish
from megacompile.runtime import disk as disks
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import DiskBuffer, HostBuffer
from megacompile.runtime.disk import Disk, Way

_DEPTH = 8  # requests in flight of io_uring and libaio
_CHUNK = 4 * 2**20
_CHUNKS_MIB, _THREADS = (1, 4, 16, 32, 64), (1, 2, 4, 8)
Run = Callable[[Way], None]


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="ways that have it in their name"
    )
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    size = int(args.gib * 2**30) // _CHUNK * _CHUNK
    disk = Disk(args.folder)
    buffer, memory = DiskBuffer(size, disk), HostBuffer(size, pin=False)
    memory.bytes(size).random_(generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, object]] = []
    for name, make in _ways(disk, buffer, memory):
        if args.only and not any(text in name for text in args.only):
            continue
        row: dict[str, object] = {"way": name}
        try:
            run = make()
        except (ImportError, OSError, RuntimeError) as error:
            row["way"] = f"{name}: {_why(error)}"
            rows.append(row)
            print(row, flush=True)
            continue
        for way in (Way.WRITE, Way.READ):
            seconds, cpu = min(_timed(partial(run, way)) for _ in range(args.repeats))
            row[f"{way.value} GB/s"] = round(size / 1e9 / seconds, 2)
            row[f"{way.value} CPU s/GB"] = round(cpu / (size / 1e9), 3)
            with _beside_python():
                seconds, _ = min(_timed(partial(run, way)) for _ in range(args.repeats))
            row[f"{way.value} GB/s beside Python"] = round(size / 1e9 / seconds, 2)
        rows.append(row)
        print(row, flush=True)
    publish("Disk", rows, args.out)
    return rows


def _why(error: Exception) -> str:
    """The reason for which a way did not run."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


@contextmanager
def _beside_python() -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ways(
    disk: Disk, buffer: DiskBuffer, memory: HostBuffer
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Names, and what makes each ready."""
    there = disk, buffer, memory
    for mib in _CHUNKS_MIB:
        for threads in _THREADS:
            yield f"{threads} threads, {mib} MiB", partial(_threads, *there, threads, mib)
    yield "4 threads, 4 MiB, cached", partial(_threads, *there, 4, 4, direct=False)
    yield "mapping", partial(_mapping, buffer, memory)
    for name, make in (("io_uring", _io_uring), ("libaio", _libaio), ("kvikio", _kvikio)):
        yield f"{name}, 4 MiB", partial(make, *there)


def _threads(
    disk: Disk,
    buffer: DiskBuffer,
    memory: HostBuffer,
    threads: int,
    mib: int,
    *,
    direct: bool = True,
) -> Run:
    disk.lanes = {way: tuple(Background("disk") for _ in range(threads)) for way in Way}
    flat = memory.bytes(len(memory))
    descriptor = disk.direct_fd if direct else None

    def run(way: Way) -> None:
        disks.CHUNK_BYTES = mib * 2**20
        before, disk.direct_fd = disk.direct_fd, descriptor
        request = disk.request(way, [buffer.span(lambda: flat)], "benchmark")
        request.begin()
        request.wait()
        disk.direct_fd = before

    return run


def _mapping(buffer: DiskBuffer, memory: HostBuffer) -> Run:
    flat, seen = memory.bytes(len(memory)), buffer.bytes(len(memory))

    def run(way: Way) -> None:
        if way is Way.READ:
            buffer.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(buffer.disk.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            flat.copy_(seen)
        else:
            seen.copy_(flat)
            os.fdatasync(buffer.disk.fd)

    return run


def _pieces(buffer: DiskBuffer, memory: HostBuffer) -> list[tuple[int, memoryview]]:
    """Offsets in the file, and memory."""
    at, view = buffer.span(lambda: memory.bytes(len(memory))).place.at, memoryview(memory)
    return [(at + i, view[i : i + _CHUNK]) for i in range(0, len(memory), _CHUNK)]


def _io_uring(disk: Disk, buffer: DiskBuffer, memory: HostBuffer) -> Run:
    uring: Any = importlib.import_module("liburing")
    ring, cqe = uring.Ring(), uring.Cqe()
    uring.io_uring_queue_init(_DEPTH, ring)
    pieces = [(at, uring.Iovec([view])) for at, view in _pieces(buffer, memory)]

    def run(way: Way) -> None:
        prepare = uring.io_uring_prep_readv if way is Way.READ else uring.io_uring_prep_writev
        waiting, flying = iter(pieces), 0
        while True:
            while flying < _DEPTH and (piece := next(waiting, None)) is not None:
                at, vector = piece
                prepare(uring.io_uring_get_sqe(ring), disk.direct_fd, vector, at)
                flying += 1
            if not flying:
                return
            uring.io_uring_submit(ring)
            uring.io_uring_wait_cqe(ring, cqe)
            assert cqe[0].res == _CHUNK, cqe[0].res
            uring.io_uring_cq_advance(ring, 1)
            flying -= 1

    return run


def _libaio(disk: Disk, buffer: DiskBuffer, memory: HostBuffer) -> Run:
    setup, events_of, submit = 206, 208, 209  # x86-64
    if os.uname().machine != "x86_64":
        raise OSError("its system calls have other numbers here")
    system = ctypes.CDLL(None, use_errno=True).syscall
    context = ctypes.c_ulong(0)
    if system(setup, _DEPTH, ctypes.byref(context)) < 0:
        raise OSError(ctypes.get_errno(), "io_setup")
    start = memory.bytes(len(memory)).data_ptr()
    pieces = [(at, start + i * _CHUNK) for i, (at, _) in enumerate(_pieces(buffer, memory))]
    events = (ctypes.c_int64 * (4 * _DEPTH))()

    def run(way: Way) -> None:
        waiting, flying = iter(pieces), 0
        keep = {}  # control blocks, while the kernel has them
        while True:
            while flying < _DEPTH and (piece := next(waiting, None)) is not None:
                code = 0 if way is Way.READ else 1
                block = struct.pack(
                    "<QIiHhIQQqQII",
                    *(piece[0], 0, 0, code, 0, disk.direct_fd, piece[1], _CHUNK, piece[0]),
                    *(0, 0, 0),
                )
                control = ctypes.create_string_buffer(block, len(block))
                keep[piece[0]] = control
                pointer = (ctypes.c_void_p * 1)(ctypes.addressof(control))
                assert system(submit, context, ctypes.c_long(1), pointer) == 1
                flying += 1
            if not flying:
                return
            one, most = ctypes.c_long(1), ctypes.c_long(_DEPTH)
            count = system(events_of, context, one, most, events, None)
            for i in range(count):
                assert events[4 * i + 2] == _CHUNK, events[4 * i + 2]
                del keep[events[4 * i]]
            flying -= count

    return run


def _kvikio(disk: Disk, buffer: DiskBuffer, memory: HostBuffer) -> Run:
    kvikio: Any = importlib.import_module("kvikio")
    defaults: Any = importlib.import_module("kvikio.defaults")
    direct = {"auto_direct_io_read": True, "auto_direct_io_write": True}
    defaults.set({"num_threads": 4, "task_size": _CHUNK, **direct})
    # it opens the file by name again, with O_DIRECT too
    file = kvikio.CuFile(f"/proc/self/fd/{disk.fd}", "r+")
    view, at = memoryview(memory), buffer.span(lambda: memory.bytes(len(memory))).place.at
    file.pread(view[:_CHUNK], file_offset=at).get()  # it asks for libcuda, for host memory too

    def run(way: Way) -> None:
        start = file.pread if way is Way.READ else file.pwrite
        assert start(view, file_offset=at).get() == len(memory)

    return run


if __name__ == "__main__":
    main()
