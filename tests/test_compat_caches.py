"""Inductor's caches hold what another process has compiled, whatever that had imported."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile import compat

ROOT = Path(__file__).resolve().parent.parent

needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


def run(program: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter with these caches; what it leaves on stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(cache), str(ROOT)]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "caches"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done


STEP = """
import torch
from megacompile import compat, megacompile
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
model.append(torch.nn.Tanh())
megacompile(model, device="cpu", lowering="inductor", progress=False)
for rows in (4, 4, 6, 8):  # the third is captured with a symbol
    model(torch.ones(rows, 8)).sum().backward()
print(*compat.cache_counts())
print(sum(p.grad.double().sum().item() for p in model.parameters()))
"""


@needs_compiler
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Nor does a script that comes to torch by another way. The log says so."""
    (tmp_path / "other.py").write_text("import torch\n")
    first = run(STEP, tmp_path)
    again = run(STEP, tmp_path, MEGACOMPILE_LOG="compile")
    other = run("import other\n" + STEP, tmp_path)
    printed = [done.stdout.splitlines() for done in (first, again, other)]
    counts, gradients = zip(*printed, strict=True)
    (found, made), *others = [tuple(map(int, count.split())) for count in counts]
    assert made
    assert others == 2 * [(found + made, 0)]
    assert len(set(gradients)) == 1
    lines = [line for line in again.stderr.splitlines() if "megacompile.compile" in line]
    assert lines and all("compiled " in line and " templates in " in line for line in lines)
    said = [line.partition("compiled ")[2].replace("(", "").split() for line in lines]
    assert sum(int(words[0]) for words in said) == found + made
    assert all(words[0] == words[5] for words in said), lines  # all of them from the cache


def test_caches_that_are_off_are_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compat.code_cache() == tmp_path
    for option in ({"fx_graph_cache": False}, {"force_disable_caches": True}):
        with torch._inductor.config.patch(option):
            assert compat.code_cache() is None


def test_what_is_compiled_is_counted() -> None:
    assert isinstance(compat.cache_counts(), compat.CacheCounts)
    from torch._dynamo.utils import counters

    before = compat.cache_counts()
    counters["inductor"]["fxgraph_cache_hit"] += 2
    counters["inductor"]["fxgraph_cache_miss"] += 3
    counters["inductor"]["fxgraph_cache_bypass"] += 4
    after = compat.cache_counts()
    assert after.since(before) == (2, 7)


def test_what_is_compiled_without_caches_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs: module)
    before = compat.cache_counts()
    compat.compile_inductor(make_fx(torch.sin)(torch.ones(3)), [torch.ones(3)])
    assert compat.cache_counts().since(before) == (0, 1)
    with compat.counted():
        pass
    assert compat.cache_counts().since(before) == (0, 2)


def test_what_is_counted_already_is_not_counted_again() -> None:
    from torch._dynamo.utils import counters

    before = compat.cache_counts()
    with compat.counted():
        counters["inductor"]["fxgraph_cache_hit"] += 1
    assert compat.cache_counts().since(before) == (1, 0)


KERNELS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megacompile import compat
from megacompile.runtime.optim.kernels.fetch import _fetch

asked = []
triton.knobs.compilation.listener = lambda **given: asked.append(given["cache_hit"])
compat.note_kernels("megacompile", lambda name, found, time_s: print(name, found, time_s > 0))
compat.note_kernels("mega", lambda *given: print("another package's"))
kinds = {"source": "i64", "target": "*i64", "numel": "i64", "BLOCK": "constexpr"}
source = ASTSource(_fetch, kinds, constexprs={"BLOCK": 1024})
for _ in range(2):
    triton.compile(source, GPUTarget("cuda", 90, 32))
print(*asked)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_in_triton_are_told_of(tmp_path: Path) -> None:
    """Compiled for a GPU, then found; whoever listened before is told too."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TRITON_INTERPRET": "0"}
    done = run(KERNELS, tmp_path, **environment)
    assert done.stdout.splitlines() == ["fetch False True", "fetch True True", "False True"]


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    compat.note_kernels("megacompile", print)


def changed_dtype() -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def changed_precision() -> Callable[[], None]:
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", before
    )


def changed_determinism() -> Callable[[], None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(False)


def changed_threads() -> Callable[[], None]:
    before = torch._inductor.config.cpp.threads
    torch._inductor.config.cpp.threads = 3
    return lambda: setattr(torch._inductor.config.cpp, "threads", before)


TAKE = """
import sys
from megacompile import compat
mine = compat.compile_settings()
with open({file!r}, "rb") as file:
    theirs = file.read()
compat.{function}(theirs)
print(mine != theirs, compat.compile_settings() == theirs)
"""


def test_settings_are_used_for_a_while() -> None:
    """Those of another moment of this process: then those of now again."""
    settings = compat.compile_settings()
    changes = (changed_dtype, changed_precision, changed_determinism, changed_threads)
    undo = [change() for change in changes]
    try:
        changed = compat.compile_settings()
        with pytest.raises(KeyError), compat.compile_settings_in_use(settings):
            assert compat.compile_settings() == settings != changed
            raise KeyError
        assert compat.compile_settings() == changed
    finally:
        for each in undo:
            each()
    assert compat.compile_settings() == settings


def test_settings_are_taken_over(tmp_path: Path) -> None:
    undo = [
        change()
        for change in (changed_dtype, changed_precision, changed_determinism, changed_threads)
    ]
    try:
        settings = compat.compile_settings()
    finally:
        for each in undo:
            each()
    file = tmp_path / "settings"
    file.write_bytes(settings)
    function = compat.use_compile_settings.__name__  # not here, where others go on
    done = run(TAKE.format(file=str(file), function=function), tmp_path)
    assert done.stdout.split() == ["True", "True"]


def test_settings_that_are_unlike_have_other_keys() -> None:
    usual = compat.compile_settings()
    assert usual == compat.compile_settings()
    for change in (changed_dtype, changed_precision, changed_determinism, changed_threads):
        undo = change()
        try:
            assert compat.compile_settings() != usual, change.__name__
        finally:
            undo()


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


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_the_workers_that_compile_start_when_they_are_told_to(wanted: str, tmp_path: Path) -> None:
    """They are asked for by the function that torch itself asks for them with."""
    assert callable(compat.start_compile_workers)
    program = (
        "from torch._inductor.async_compile import AsyncCompile\n"
        "from megacompile import compat\n"
        "before = AsyncCompile.process_pool.cache_info().currsize\n"
        "compat.start_compile_workers()\n"
        "print(before, AsyncCompile.process_pool.cache_info().currsize)\n"
    )
    environment = {"TORCH_WARM_POOL": wanted, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    assert run(program, tmp_path, **environment).stdout.split() == ["0", wanted]


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
    with pytest.raises(ValueError, match="known when it has run"):
        compat.packed_graph(module)


def test_code_is_made_without_device_memory() -> None:
    """Nothing is loaded, and no fake tensor is a reason for a context."""
    config = torch._inductor.config
    assert compat.compiles_without_device()
    for name in ("max_autotune", "max_autotune_gemm"):
        with config.patch({name: True}):
            assert not compat.compiles_without_device()
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


def test_who_compiles_kernels() -> None:
    config = torch._inductor.config
    with config.patch(compile_threads=1):
        assert not compat.compiles_in_processes()
        compat.use_compile_threads(7)
        assert config.compile_threads == compat.compile_threads() == 7
        assert compat.compiles_in_processes()
        with config.patch(fx_graph_cache=False):
            assert not compat.compiles_in_processes()


def test_variables_say_where_the_caches_are(tmp_path: Path) -> None:
    for name in compat.CACHE_VARIABLES:
        assert name.endswith("_CACHE_DIR")
    with mock.patch.dict(os.environ, {compat.CACHE_VARIABLES[0]: str(tmp_path)}):
        assert compat.code_cache() == tmp_path
