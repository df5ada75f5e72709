"""Host buckets: exact-size memory, a storage a parameter, page-locking, and how much there is."""

from __future__ import annotations

import gc
import io
import mmap
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from megacompile import HostMemoryError, host_memory
from megacompile.host_memory import available_bytes, check_host_memory, total_bytes
from megacompile.ir.buckets import Bucket
from megacompile.page_locks import PageLocks
from megacompile.runtime.device import buffers
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.params.bucket import HostBucket
from tests.layouts import layout_of, odd_tensors

GIB = 2**30


def parameters() -> list[nn.Parameter]:
    """Different shapes, dtypes and strides."""
    tensors = [*odd_tensors(), torch.randn(6, 10)[:, ::2]]
    return [nn.Parameter(t, requires_grad=t.is_floating_point()) for t in tensors]


def bucket_of(params: Sequence[nn.Parameter], *, pin: bool = False) -> HostBucket:
    return HostBucket(layout_of(params), params, pin=pin)


def mapping_of(tensor: Tensor) -> tuple[int, str]:
    """(bytes, permissions) of the mapping that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= tensor.data_ptr() < end:
            return end - start, permissions
    raise AssertionError("nowhere")


def mapped_bytes() -> int:
    """Of all of the process: the kernel makes one mapping of private ones side by side."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


# --- memory


@linux
def test_a_buffer_takes_what_it_needs() -> None:
    """Not the next power of two: five pages and a bit are six pages."""
    size = 5 * mmap.PAGESIZE + 3
    buffer = HostBuffer(size, pin=False)
    assert len(buffer) == size
    flat = buffer.bytes(size)
    assert flat.numel() == size
    before = mapped_bytes()
    more = HostBuffer(size, pin=False)
    assert mapped_bytes() - before == 6 * mmap.PAGESIZE
    del more


@linux
def test_a_locked_buffer_is_shared_with_forked_loaders(cudart: Cudart) -> None:
    """A private mapping would become copy-on-write under the DMA, see the note of the module."""
    flat = HostBuffer(100, pin=True).bytes(100)
    assert mapping_of(flat)[1] == "rw-s"


def test_a_buffer_is_unmapped_with_its_last_tensor() -> None:
    params = parameters()
    bucket = bucket_of(params)
    buffer = HostBuffer(bucket.layout.size_bytes, pin=False)
    alive = weakref.ref(buffer)
    tensors = [buffer.tensor(place) for place in bucket.layout.params]
    view = tensors[0][3:]
    del buffer, tensors
    gc.collect()
    assert alive() is not None
    view.fill_(1)
    del view
    gc.collect()
    assert alive() is None


def test_a_bucket_holds_the_values_of_its_parameters() -> None:
    params = parameters()
    before = [(p, p.detach().clone(), p.requires_grad) for p in params]
    bucket = bucket_of(params)
    assert bucket.flat.numel() == bucket.layout.size_bytes
    assert [id(p) for p in bucket.params] == [id(p) for p in params]
    for (param, value, requires_grad), place in zip(before, bucket.layout.params, strict=True):
        assert torch.equal(param.detach(), value)
        assert (param.stride(), param.requires_grad) == (place.stride, requires_grad)
        raw = bucket.flat[place.offset_bytes : place.offset_bytes + place.size_bytes]
        if place.numel:
            assert param.data_ptr() == raw.data_ptr()
            there = raw.view(place.dtype).as_strided(place.shape, place.stride)
            assert torch.equal(there, value)


def test_a_write_to_a_parameter_is_a_write_to_the_bucket() -> None:
    params = parameters()
    bucket = bucket_of(params)
    with torch.no_grad():
        params[5].copy_(torch.full((9,), 5))
    offset = bucket.layout.params[5].offset_bytes
    assert bucket.flat[offset : offset + 9].tolist() == [5] * 9


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_each_tensor_has_a_storage_of_its_own(what: str) -> None:
    params = parameters()
    bucket = bucket_of(params)
    bucket.make_grads()
    if what == "gradients":
        params = [param for param in params if param.requires_grad]
    tensors = params if what == "parameters" else list(bucket.grads.values())
    storages = [t.untyped_storage() for t in tensors]
    assert [s.nbytes() for s in storages] == [t.numel() * t.itemsize for t in tensors]
    assert [t.storage_offset() for t in tensors] == [0] * len(params)
    filled = [s.data_ptr() for s in storages if s.nbytes()]
    assert len(set(filled)) == len(filled)


def test_saving_one_parameter_saves_only_that() -> None:
    params = [nn.Parameter(torch.ones(n)) for n in (1_000_000, 10)]
    bucket = bucket_of(params)
    file = io.BytesIO()
    torch.save(params[1], file)
    assert file.tell() < 5000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, params[1])
    assert not bucket.flat.data_ptr() <= loaded.data_ptr() < bucket.flat.data_ptr() + 5_000_000


def test_parameters_survive_their_bucket() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    bucket = bucket_of(params)
    gone = weakref.ref(bucket)
    del bucket
    gc.collect()
    assert gone() is None
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param.detach(), value)
        with torch.no_grad():
            param.mul_(2)
        assert torch.equal(param.detach(), value * 2)


def test_a_bucket_without_an_element() -> None:
    """A unit whose parameters are all empty, as those of `nn.Linear(0, 3, bias=False)`."""
    param = nn.Parameter(torch.empty(3, 0))
    bucket = bucket_of([param])
    bucket.make_grads()
    assert bucket.flat.numel() == 0
    assert param.shape == bucket.grads[0].shape == (3, 0)


def test_gradients_lie_as_the_parameters_do() -> None:
    params = parameters()
    bucket = bucket_of(params)
    assert list(bucket.grads) == []
    bucket.make_grads()
    ours = [(g.shape, g.stride(), g.dtype) for g in bucket.grads.values()]
    assert ours == [(p.shape, p.stride(), p.dtype) for p in params if p.requires_grad]
    places = {g.data_ptr() for g in bucket.grads.values() if g.numel()}
    assert not places & {p.data_ptr() for p in params}
    before = bucket.grads[0].data_ptr()
    held = bucket.grads
    bucket.make_grads()
    assert bucket.grads[0].data_ptr() != before, "new memory, what is held stays"
    del held


# --- adopting what the user did


def test_adopting_what_did_not_change_does_nothing() -> None:
    params = parameters()
    bucket = bucket_of(params)
    with torch.no_grad():
        params[0].add_(1)
    before = [(p.data_ptr(), p._version) for p in params]
    assert bucket.adopt()
    assert [(p.data_ptr(), p._version) for p in params] == before


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "new storage": lambda t: t * 2,
    "other strides": lambda t: (t * 2).t().contiguous().t(),
    "view of a larger tensor": lambda t: torch.cat([t, t])[: len(t)],
    "expanded": lambda t: torch.ones(()).expand(t.shape),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_replaced_data_is_adopted(kind: str) -> None:
    params = parameters()
    bucket = bucket_of(params)
    theirs = REPLACEMENTS[kind](params[0].detach())
    wanted = theirs.clone()
    params[0].data = theirs
    version = params[0]._version
    assert bucket.adopt()
    assert params[0].data_ptr() == bucket.flat.data_ptr()
    assert params[0].stride() == bucket.layout.params[0].stride
    assert torch.equal(params[0].detach(), wanted)
    assert params[0]._version > version, "a pending backward must see that it changed"
    theirs.data = torch.zeros(())
    assert torch.equal(params[0].detach(), wanted), "what was given is copied, not kept"


@pytest.mark.parametrize(
    "theirs",
    [torch.zeros(33, 8), torch.zeros(33, 77, dtype=torch.float64), torch.zeros(77)],
    ids=["wider", "double", "other shape"],
)
def test_another_shape_or_dtype_needs_another_layout(theirs: Tensor) -> None:
    params = parameters()
    bucket = bucket_of(params)
    params[0].data = theirs
    assert not bucket.adopt()
    assert params[0].data_ptr() == theirs.data_ptr(), "left for the new layout"


# --- page-locking


class Cudart:
    """What `torch.cuda.cudart()` gives, noting its calls."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.locked.append((address, size))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert self.calls == ["synchronize"], "a copy may be under way"
        self.unlocked.append(address)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.calls.append("synchronize"))
    monkeypatch.setattr(buffers, "PAGE_LOCKS", PageLocks())
    return made


def test_a_bucket_is_locked_as_a_whole_and_unlocked_with_its_last_tensor(cudart: Cudart) -> None:
    params = parameters()
    bucket = bucket_of(params, pin=True)
    address = bucket.flat.data_ptr()
    assert cudart.locked == [(address, bucket.layout.size_bytes)]
    del bucket
    gc.collect()
    assert cudart.unlocked == [], "the parameters still lie there"
    params.clear()
    gc.collect()
    assert cudart.unlocked == [address]


def test_gradients_are_locked_too(cudart: Cudart) -> None:
    bucket = bucket_of(parameters(), pin=True)
    assert len(cudart.locked) == 1, "only once they are needed"
    bucket.make_grads()
    assert cudart.locked[1][0] == bucket.grads[0].data_ptr()


def test_nothing_is_locked_for_the_cpu(cudart: Cudart) -> None:
    bucket = bucket_of(parameters(), pin=False)
    bucket.make_grads()
    del bucket
    gc.collect()
    assert (cudart.locked, cudart.unlocked) == ([], [])


def test_what_cannot_be_locked_stays_pageable_and_is_said_once(cudart: Cudart) -> None:
    cudart.error = 2
    params = parameters()
    before = [p.detach().clone() for p in params]
    with pytest.warns(UserWarning, match="cudaHostRegister of .* failed with error 2") as said:
        buckets = [bucket_of(params, pin=True)]
    assert len(said) == 1
    assert "plans allow for that" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buckets.append(bucket_of(parameters(), pin=True))
        buckets[0].make_grads()
    size = buckets[0].layout.size_bytes
    assert len(cudart.locked) == 1 + (len(buckets[0]._memory[0]) < size), "what is as large"
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param.detach(), value)
    buckets.clear()
    params.clear()
    gc.collect()
    assert cudart.unlocked == [], "what was never locked"


# --- states, codes, copies

OWNER = SGD([torch.zeros(1)])


def test_states_mirror_the_parameters() -> None:
    """Neighbours are as far apart, in elements, so that one span covers them in each."""
    bucket = bucket_of([nn.Parameter(torch.randn(n)) for n in (5, 300, 7)])
    bucket.states.make(OWNER, "exp_avg", {i: torch.bfloat16 for i in range(3)}, pin=False)
    bucket.make_grads()
    first = bucket.values[0].data_ptr()
    distances = [(v.data_ptr() - first) // v.itemsize for v in bucket.values]
    states = bucket.states.of(OWNER)["exp_avg"]
    assert all(isinstance(state, Tensor) and not state.any() for state in states.values())
    for found in (states, bucket.grads):
        tensors = [t for t in found.values() if isinstance(t, Tensor)]
        start = tensors[0].data_ptr()
        assert [(t.data_ptr() - start) // t.itemsize for t in tensors] == distances
        tensors[2].fill_(3)
        span = bucket.span(tensors[0], distances[2] + 7)
        assert span.dtype == tensors[0].dtype and span[-7:].tolist() == [3.0] * 7
    with pytest.raises(AssertionError, match="leaves the memory"):
        bucket.span(bucket.grads[2], 2**20)


def test_a_state_is_kept_until_its_dtype_changes() -> None:
    bucket = bucket_of([nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3))])
    bucket.states.make(OWNER, "m", {0: torch.float32}, pin=False)
    before = bucket.states.of(OWNER)["m"][0]
    bucket.states.make(OWNER, "m", {0: torch.float32, 1: torch.float32}, pin=False)
    assert bucket.states.of(OWNER)["m"][0] is before
    bucket.states.make(OWNER, "m", {0: torch.bfloat16}, pin=False)
    assert bucket.states.of(OWNER)["m"][0] is not before


def test_codes_and_largest_magnitudes() -> None:
    bucket = bucket_of([nn.Parameter(torch.randn(5000)), nn.Parameter(torch.randn(3))])
    bucket.states.make_codes(OWNER, "m", [0], pin=False)
    made = bucket.states.of(OWNER)["m"][0]
    assert isinstance(made, tuple)
    codes, absmax = made
    assert (codes.shape, codes.dtype, absmax.dtype) == ((5000,), torch.uint8, torch.float32)
    bucket.states.make_codes(OWNER, "m", [0], pin=False)
    assert bucket.states.of(OWNER)["m"][0] is made


def test_a_copy_in_another_dtype_follows_the_parameters() -> None:
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    likes = [(f"p{i}", p.detach().to(torch.bfloat16)) for i, p in enumerate(params)]
    bucket = HostBucket(Bucket.layout(0, "unit", likes), params, pin=False)
    assert bucket.has_copy and bucket.flat.numel() == bucket.layout.size_bytes
    assert not bucket_of([nn.Parameter(torch.ones(1))]).has_copy
    for through_data in (False, True):
        with torch.no_grad():
            (params[0].data if through_data else params[0]).mul_(2)
        bucket.refresh()
        assert torch.equal(bucket.streamed[0], params[0].detach().to(torch.bfloat16))
    bucket.streamed[1].fill_(7)
    bucket.copy.take_back(1)
    assert params[1].tolist() == [7.0] * 5


# --- how much there is


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what there is, and writes the files of the cgroup that `host_memory` reads."""
    monkeypatch.setattr(
        host_memory, "Path", lambda *parts: tmp_path / Path(*parts).relative_to("/")
    )

    def write(available: int, **cgroup: int | str) -> None:
        memory = SimpleNamespace(available=available, total=99 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        folder = tmp_path / "sys" / "fs" / "cgroup"
        folder.mkdir(parents=True)
        inactive = cgroup.pop("inactive_file", None)
        if inactive is not None:
            (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nfile 7\n")
        for name, value in cgroup.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    return write


@pytest.mark.parametrize(
    ("available", "cgroup", "wanted"),
    [
        (10 * GIB, {}, 10 * GIB),  # no cgroup
        (10 * GIB, {"max": "max", "current": 5 * GIB}, 10 * GIB),  # no limit
        (10 * GIB, {"max": 8 * GIB, "current": 5 * GIB}, 3 * GIB),
        (10 * GIB, {"max": 64 * GIB, "current": 5 * GIB}, 10 * GIB),  # more than there is
        (10 * GIB, {"max": 8 * GIB, "current": 5 * GIB, "inactive_file": 2 * GIB}, 5 * GIB),
        (10 * GIB, {"max": 8 * GIB}, 10 * GIB),
    ],
)
def test_available_memory(
    machine: Callable[..., None], available: int, cgroup: dict[str, int | str], wanted: int
) -> None:
    machine(available, **cgroup)
    assert available_bytes() == wanted


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 2}, 6),  # SLURM
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 7, "memory.max": 20}, 1),
        ("0::/job", {"other/memory.max": 8, "other/memory.current": 7}, 10),
        (
            "0::/../job",
            {"job/memory.max": 8, "job/memory.current": 2},
            10,
        ),  # outside of what we see
        (
            "4:cpu,memory:/a\n0::/",
            {"memory/a/memory.limit_in_bytes": 5, "memory/a/memory.usage_in_bytes": 2},
            3,
        ),
        (
            "4:memory:/unseen",  # a container that sees its own at the root
            {"memory/memory.limit_in_bytes": 5, "memory/memory.usage_in_bytes": 1},
            4,
        ),
    ],
)
def test_limits_of_the_cgroups_around_it(
    machine: Callable[..., None], tmp_path: Path, line: str, files: dict[str, int], wanted: int
) -> None:
    machine(10 * GIB)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(line + "\n")
    for name, size in files.items():
        place = tmp_path / "sys" / "fs" / "cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{size * GIB}\n")
    assert available_bytes() == wanted * GIB


@pytest.mark.parametrize(("limits", "wanted"), [((9, -1), 8), ((9, 3), 1), ((-1, -1), 10)])
def test_limits_of_the_process(
    machine: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    wanted: int,
) -> None:
    """`ulimit -v` and `ulimit -d`; -1: none."""
    resource = pytest.importorskip("resource")
    machine(10 * GIB)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    pages = GIB // resource.getpagesize()
    (tmp_path / "proc" / "self" / "statm").write_text(f"{pages} 1 1 1 0 {2 * pages} 0\n")
    of = dict(zip((resource.RLIMIT_AS, resource.RLIMIT_DATA), limits, strict=True))
    infinity = resource.RLIM_INFINITY
    limit = {kind: n * GIB if n >= 0 else infinity for kind, n in of.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit[kind], infinity))
    assert available_bytes() == wanted * GIB


@pytest.mark.parametrize(("limit", "wanted"), [("max", 99 * GIB), (8 * GIB, 8 * GIB)])
def test_all_memory(machine: Callable[..., None], limit: int | str, wanted: int) -> None:
    machine(4 * GIB, max=limit)
    assert total_bytes() == wanted


def test_what_fits_is_fine(machine: Callable[..., None]) -> None:
    machine(4 * GIB)
    check_host_memory([("parameters", 2 * GIB), ("gradients", GIB)])
    check_host_memory([])


def test_too_little_memory_is_said_with_the_table(machine: Callable[..., None]) -> None:
    machine(64 * GIB, max=16 * GIB, current=4 * GIB)
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * 2**29)])
        check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * GIB)])
    assert isinstance(caught.value, MemoryError)
    assert str(caught.value).splitlines() == [
        "megacompile(): host memory is too small",
        "  parameters to move       9 GiB",
        "  gradients                3 GiB",
        "  needed                  12 GiB",
        "  available             11.8 GiB",
        "free host memory (or raise host_memory=), use a smaller dtype (model.bfloat16()), or "
        "freeze parameters (requires_grad_(False)), which need no gradients",
    ]


def test_a_margin_is_left_for_the_process(machine: Callable[..., None]) -> None:
    machine(GIB)
    check_host_memory([("parameters", 3 * GIB // 4)])
    with pytest.raises(HostMemoryError, match=r"available +768 MiB"):
        check_host_memory([("parameters", 3 * GIB // 4 + 1)])


def test_a_limit_of_the_users_is_kept() -> None:
    check_host_memory([("parameters", 2 * 2**20)], 2 * 2**20)
    with pytest.raises(HostMemoryError, match=r"(?s)parameters +2 MiB.*available +1 MiB.*host_mem"):
        check_host_memory([("parameters", 2 * 2**20)], 2**20)


def test_no_memory_at_all_is_not_less_than_none(machine: Callable[..., None]) -> None:
    machine(2**20, max=2**20, current=2**24)
    with pytest.raises(HostMemoryError, match=r"available +0 B\n"):
        check_host_memory([("parameters", 1)])


def test_memory_of_gradients_goes_when_it_is_made_anew() -> None:
    bucket = bucket_of(parameters())
    bucket.make_grads()
    old = next(iter(bucket.grads.values()))
    count = len(bucket._memory)
    assert bucket.holds(old)
    bucket.make_grads()
    assert not bucket.holds(old) and len(bucket._memory) == count
