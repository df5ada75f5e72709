"""Fixtures for all tests. Those that need a GPU are skipped without one, with the reason."""

from __future__ import annotations

import collections
import gc
import importlib
import itertools
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

# What asserts for the tests says why, as they do.
pytest.register_assert_rewrite("tests.edits", "tests.training", "tests.zoo")
torch.set_num_threads(1)  # the models are small: threads cost more than they gain
# Each process that compiles would build and load a library for each set of vector instructions that
# the CPU reports, and trust none: half a minute. Inductor reads it when it is first imported.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Where this logger has a handler, torch makes a trace of each capture. It takes its own one away;
# pytest gives its handlers to every logger that does not propagate.
logging.getLogger("torch.__trace").handlers.clear()
logging.getLogger("torch.__trace").propagate = True
gc.set_threshold(20_000, 20, 20)  # a million objects live; a capture makes as many, for a moment
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is first imported
else:
    from megacompile import compat  # not above: triton would be imported before its variable is set

    # Tests beside one another measure less than there is: nobody else is to plan with that.
    os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/megacompile-tests-{os.getuid()}"
    # Each would start processes that compile for half of the cores, and Inductor for all of them.
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if beside > 1:
        share = str(max(1, len(psutil.Process().cpu_affinity()) // beside))
        os.environ.setdefault("MEGACOMPILE_COMPILE_PROCESSES", share)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", share)
    compat.use_expandable_segments()  # as megacompile() does where it comes before the first tensor

# As in a user's process, all of it is there, whatever a test and those before it import.
importlib.import_module("megacompile.api")


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        count = marker.kwargs.get("count", 1) if marker else 0
        if there < count:
            needed = "a CUDA device" if count == 1 else f"{count} CUDA devices"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed}"))
    items[:] = _long_first(items)


def _long_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests, each of those that take minutes before a short one: a worker gets two at first."""
    gpu = [(item, item.get_closest_marker("gpu")) for item in items]
    long = [item for item, marker in gpu if marker and marker.kwargs.get("long")]
    short = [item for item in items if item not in long]
    pairs = itertools.zip_longest(long, short[: len(long)])
    return [*filter(None, itertools.chain(*pairs)), *short[len(long) :]]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the time of each tier: a folder of tests (`tests/README.md`)."""
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    cases: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.partition("::")[0].split("/")[1:-1]
                tier = folder[0] if folder else "tests"
                seconds[tier] += report.duration
                cases[tier] += report.when == "call"
    for tier, time_s in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{tier:10} {cases[tier]:6} tests {time_s:8.1f} s of one core")


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """Dynamo says in its log how long guards take; for that it empties the CPU's caches, which
    takes 17 ms for each frame that it captures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _same_draws() -> Iterator[None]:
    """Hypothesis draws numbers that stand in our sources more often than others. So draws would be
    others after each edit, and in a run of other files."""
    with pytest.MonkeyPatch.context() as patch:
        providers = "hypothesis.internal.conjecture.providers"
        patch.setattr(f"{providers}.is_local_module_file", lambda _: False, raising=False)
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """Captured graphs of one test do not count towards another's recompilations, and their guards
    go: their finalizers would be a million objects after a thousand tests."""
    torch.compiler.reset()
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer, info in registry.copy().items():  # threads add to it
        owner = getattr(getattr(info.func, "func", None), "__self__", None)
        if type(owner).__name__ == "CheckFunctionManager":
            finalizer.detach()


@pytest.fixture(autouse=True)
def _subclasses_work() -> Iterator[None]:
    """A test that leaves `__torch_function__` off fails itself, and not those after it."""
    yield
    torch_c: Any = torch._C  # its stubs leave these out
    enabled = torch_c._is_torch_function_enabled()
    torch_c._set_torch_function_state(torch_c._TorchFunctionState.ENABLED)
    assert enabled, "the test has left __torch_function__ off in this thread"


@pytest.fixture(autouse=True, scope="module")
def _fresh_fakes() -> Iterator[None]:
    """What torch keeps for good, of fake tensors and of graph breaks, does not outlive a module."""
    yield
    torch._subclasses.FakeTensorMode.cache_clear()
    resumed = torch._dynamo.resume_execution.ContinueExecutionCache
    getattr(resumed, "generated_code_metadata", {}).clear()


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For loops that take all GPUs that they see: they see one at most."""
    count = min(torch.cuda.device_count(), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
