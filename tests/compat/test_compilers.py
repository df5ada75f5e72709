"""What compat takes for granted of Dynamo, of Inductor's caches, and of graphs for other processes.

Containers, as Dynamo traces them, beside plain Python; and the caches of the allocator. The package
states the versions of torch. These tests ask torch itself, so they fail where a new version does
something else: `make matrix` runs them on all.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import re
import sys
import tomllib
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile import compat
from tests.equality.nets import Applies
from tests.zoo import equal


def test_caches_that_are_off_are_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all(name.endswith("_CACHE_DIR") for name in compat.CACHE_VARIABLES)
    monkeypatch.setenv(compat.CACHE_VARIABLES[0], str(tmp_path))
    assert compat.code_cache() == tmp_path
    for option in ({"fx_graph_cache": False}, {"force_disable_caches": True}):
        with torch._inductor.config.patch(option):
            assert compat.code_cache() is None


def changed(place: Any, name: str, value: Any) -> Callable[[], None]:
    """How to change a setting for good; gives how to change it back."""
    before = getattr(place, name)
    setattr(place, name, value)
    return lambda: setattr(place, name, before)


def changed_dtype() -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def changed_determinism() -> Callable[[], None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(False)


CHANGES: tuple[Callable[[], Callable[[], None]], ...] = (
    changed_dtype,
    changed_determinism,
    lambda: changed(torch.backends.cudnn, "enabled", False),
    lambda: changed(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    lambda: changed(torch._inductor.config.cpp, "threads", 3),
)


@contextmanager
def all_changed() -> Iterator[None]:
    undo = [change() for change in CHANGES]
    try:
        yield
    finally:
        for each in undo:
            each()


def test_settings_are_used_for_a_while() -> None:
    """Those of another moment of this process: then those of now again."""
    settings = compat.compile_settings()
    for i, change in enumerate(CHANGES):
        undo = change()
        assert compat.compile_settings() != settings, i
        undo()
        assert compat.compile_settings() == settings
    with all_changed():
        changed = compat.compile_settings()
        with pytest.raises(KeyError), compat.compile_settings_in_use(settings):
            assert compat.compile_settings() == settings != changed
            raise KeyError
        assert compat.compile_settings() == changed
    assert compat.compile_settings() == settings


def test_settings_of_another_process_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its system: a process that sees no GPU would have other keys."""
    base = torch._inductor.codecache.CacheBase
    with monkeypatch.context() as other, all_changed():
        other.setattr(base, "get_system", staticmethod(lambda: {"device": "another"}))
        theirs = compat.compile_settings()
    monkeypatch.setattr(base, "get_system", base.get_system)  # to be put back behind the test
    mine = compat.compile_settings()
    assert mine != theirs
    try:
        compat.use_compile_settings(theirs)
        assert compat.compile_settings() == theirs
    finally:
        compat.use_compile_settings(mine)
    assert compat.compile_settings() == mine


def test_the_key_of_a_memory_format_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the module where it is found first."""
    from torch._inductor.codecache import FxGraphCachePickler

    compat.settle_cache_keys()
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    dumped = FxGraphCachePickler(module).dumps(torch.contiguous_format)
    assert b"torch.contiguous_format" in dumped
    assert b"_utils" not in dumped and b"builtins" in dumped
    other: Any = types.ModuleType("other")
    other.torch = torch
    with monkeypatch.context() as planted:
        planted.setattr(sys, "modules", {"other": other, **sys.modules})
        assert FxGraphCachePickler(module).dumps(torch.contiguous_format) == dumped


def test_code_for_other_kernels_is_not_found() -> None:
    """Without cuDNN a convolution's result has other strides, and code for cuDNN's fails."""
    compat.settle_cache_keys()

    def made() -> tuple[int, ...]:
        before = compat.cache_counts()
        compat.compile_inductor(make_fx(torch.sin, tracing_mode="fake")(torch.ones(3)), [fake])
        return tuple(map(operator.sub, compat.cache_counts(), before))

    with compat.fake_mode():
        fake = torch.empty(3)
    with torch._inductor.utils.fresh_cache():
        assert made() == (0, 1)
        with torch.backends.cudnn.flags(enabled=False):
            assert made() == (0, 1)
        assert made() == (1, 0)


def test_who_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = torch._inductor.config, list[bool]()
    with config.patch(compile_threads=1):
        assert not compat.compiles_in_processes()
        compat.use_compile_threads(7)
        assert config.compile_threads == compat.compile_threads() == 7
        assert compat.compiles_in_processes()
        tuned = ({"max_autotune": True}, {"max_autotune_gemm": True})
        for options in ({"fx_graph_cache": False}, *tuned):
            with config.patch(options):
                assert not compat.compiles_in_processes()
    warm = "torch._inductor.async_compile.maybe_warm_pool"
    assert callable(torch._inductor.async_compile.maybe_warm_pool)
    monkeypatch.setattr(warm, lambda: asked.append(True))
    compat.start_compile_workers()
    assert asked == [True]


def test_a_graph_is_the_same_in_another_process() -> None:
    """What is packed here and unpacked there."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    module = make_fx(function, tracing_mode="fake")(torch.ones(3))
    other = compat.unpacked_graph(compat.packed_graph(module))
    assert list(map(str, other.graph.nodes)) == list(map(str, module.graph.nodes))
    assert "torch.ops.aten.sin.default(x_1)" in other.code
    (x,) = module.graph.find_nodes(op="placeholder")
    x.meta["unbacked_bindings"] = {}
    with pytest.raises(ValueError, match="depends on data"):
        compat.packed_graph(module)


def test_code_is_made_without_device_memory() -> None:
    """Nothing is loaded, and no fake tensor is a reason for a context."""
    stock = CachingAutotuner.precompile, fake_tensor.init_gpu_context
    with compat.without_device_memory():
        fake_tensor.init_gpu_context(torch.device("cuda:99"))
        kernel = mock.Mock(spec=CachingAutotuner)
        CachingAutotuner._make_launchers(kernel)
        CachingAutotuner._dynamic_scale_rblock(kernel)
        assert not kernel.mock_calls
    assert (CachingAutotuner.precompile, fake_tensor.init_gpu_context) == stock
    for name in ("_make_launchers", "_dynamic_scale_rblock"):
        assert f"self.{name}()" in inspect.getsource(CachingAutotuner.precompile)


ROOT = Path(__file__).resolve().parents[2]


def matrix() -> list[str]:
    """The versions that `make matrix` runs, oldest first."""
    found = re.search(r"^MATRIX \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_the_package_states_its_versions() -> None:
    assert f"torch {matrix()[0]} to {matrix()[-1]}:" in (compat.__doc__ or "")


def test_every_entry_is_what_callers_get() -> None:
    """No other module of the package has an import of that name."""
    for path in (ROOT / "megacompile" / "compat").glob("[!_]*.py"):
        home = importlib.import_module(f"megacompile.compat.{path.stem}")
        for name, value in vars(home).items():
            if getattr(value, "__module__", "") == home.__name__ and not name.startswith("_"):
                assert getattr(compat, name) is value, name


def test_the_bounds_of_torch_are_what_the_matrix_runs() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [each for each in dependencies if re.match(r"torch\W", each)]
    major, minor = matrix()[-1].split(".")
    assert torch == f"torch>={matrix()[0]},<{major}.{int(minor) + 1}"


@pytest.mark.gpu
def test_page_locked_memory_is_given_back() -> None:
    torch.cuda.init()  # there are no figures before
    compat.release_pinned_cache(torch.device("cuda"))
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] > held
    compat.release_pinned_cache(torch.device("cuda"))
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == held


@pytest.mark.gpu
def test_caches_are_given_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.cuda.memory_allocated()  # by the tests before
    a = torch.ones(2048, 2048, device=device)
    (a @ a).sum().item()  # makes a workspace
    del a
    reserved = torch.cuda.memory_reserved()
    compat.release_device_cache(device)
    assert torch.cuda.memory_allocated() <= held
    assert torch.cuda.memory_reserved() <= reserved - 16 * 2**20  # that of `a` at least


def keeps(change: Callable[[Any, Tensor], Tensor], longest: int | None) -> Any:
    """A model with a full deque, and an ordered dict; `change` uses them in each call."""
    named = OrderedDict((name, torch.ones(2) * (i + 1)) for i, name in enumerate("abc"))
    return Applies(change, last=deque([torch.ones(2), torch.ones(2) * 2], longest), named=named)


def weighted(values: Any) -> Tensor:
    """Depends on the order."""
    found = torch.zeros(2)
    for i, value in enumerate(values):
        found = found + value * (i + 1)
    return found


def pop_and_append(m: Any, x: Tensor) -> Tensor:
    first = m.last.popleft()
    m.last.append(x)
    m.last.append(x + first)
    return weighted(m.last)


def copied(m: Any, x: Tensor) -> Tensor:
    copy = m.last.copy()
    copy.append(x)
    return weighted(copy)


def in_turn(m: Any, x: Tensor) -> Tensor:
    name, value = m.named.popitem(last=False)
    m.named[name] = value
    return x * value


def cache(m: Any, x: Tensor) -> Tensor:
    m.named["new"] = x
    m.named.move_to_end("new", last=False)
    while len(m.named) > 2:
        m.named.popitem()
    return weighted(m.named.values())


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "append": lambda m, x: (m.last.append(x), weighted(m.last))[1],
    "extendleft": lambda m, x: (m.last.extendleft([x, x + 1]), weighted(m.last))[1],
    "append, unseen": lambda m, x: (m.last.append(x), x * 2)[1],
    "pop and append": pop_and_append,
    "a copy": copied,
    "the longest": lambda m, x: x * m.last.maxlen,
    "in turn": in_turn,
    "a cache": cache,
}


@pytest.mark.parametrize("change", USES)
def test_containers_are_those_of_python(change: str) -> None:
    """A deque of another length is another case."""
    for _ in range(2):  # once
        compat.follow_containers()
    torch._dynamo.reset()
    for longest in (2, 3, None) if change == "append" else (2,):
        plain, traced = (keeps(USES[change], longest) for _ in range(2))
        compiled: Any = torch.compile(traced, backend="eager", fullgraph=True)
        for i in range(4):
            x = torch.full((2,), float(i))
            assert equal(plain(x), compiled(x)), i
            assert len(plain.last) == len(traced.last) and all(map(equal, plain.last, traced.last))
            assert list(plain.named) == list(traced.named)
            assert all(map(equal, plain.named.values(), traced.named.values()))
        assert traced.last.maxlen == longest


def test_a_vmap_that_fails_is_left() -> None:
    before = torch._C._functorch.maybe_current_level()
    with pytest.raises(ZeroDivisionError), compat.keeping_nesting():
        compat.VMAP_BEGIN(2, "error")
        compat.VMAP_BEGIN(2, "error")
        raise ZeroDivisionError
    assert torch._C._functorch.maybe_current_level() == before


def test_pages_are_hidden_in_a_thread_until_its_call_ends() -> None:
    """Calls of two threads may end in the order in which they began."""
    name = "torch._subclasses.fake_tensor"
    assert name == fake_tensor.log.name
    calls: list[list[Callable[[], object]]] = [[], []]
    compat.hide_fake_errors(calls[0])
    began, may_end = Event(), Event()

    def other() -> None:
        compat.hide_fake_errors(calls[1])
        began.set()
        may_end.wait()
        calls[1][0]()

    thread = Thread(target=other)
    thread.start()
    began.wait()
    page = logging.LogRecord(name, logging.ERROR, "", 0, "a page", (), None)
    assert not shows(page)
    calls[0][0]()
    assert shows(page)
    may_end.set()
    thread.join()
    assert shows(page)


def shows(record: logging.LogRecord) -> bool:
    return not fake_tensor.log.disabled and bool(fake_tensor.log.filter(record))


def test_dynamo_compiles_under_the_lock() -> None:
    """Another thread cannot take it while a backend runs. No garbage is collected, if told so."""
    taken: list[bool] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        def attempt() -> None:
            lock: Any = compat.compile_lock
            taken.append(lock.acquire(blocking=False))
            if taken[-1]:
                lock.release()

        thread = Thread(target=attempt)
        thread.start()
        thread.join()
        return module.forward

    before = torch._dynamo.config.run_gc_after_compile
    with compat.without_collecting():
        assert torch._dynamo.config.run_gc_after_compile is False
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert taken == [False] and torch._dynamo.config.run_gc_after_compile is before
