"""Inductor's caches: their folders, the inputs of their keys, and counts of hits."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import codecache
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from megacompile.compat.patches import replace

# Environment variables with the caches' folders.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def code_cache() -> Path | None:
    """The folder of compiled code on disk; None if caches are off."""
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return None
    return Path(cache_dir())


def settle_cache_keys() -> None:
    """Makes the keys of Inductor's caches, hashes of pickles, independent of the order of imports:
    a `torch.memory_format` pickles as a name in the first module that has an attribute `torch`."""

    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.dispatch_table[torch.memory_format] = lambda value: (str, (str(value),))

    replace(codecache.FxGraphCachePickler, "__init__", init)


class CacheCounts(NamedTuple):
    """Graphs that were compiled in this process."""

    found: int  # in a cache
    made: int

    def since(self, before: CacheCounts) -> CacheCounts:
        """The counts since `before`."""
        return CacheCounts(self.found - before.found, self.made - before.made)


def cache_counts() -> CacheCounts:
    """Graphs that Inductor compiled so far; it counts none if its caches are off."""
    of = counters["inductor"]
    made = of["fxgraph_cache_miss"] + of["fxgraph_cache_bypass"]
    return CacheCounts(of["fxgraph_cache_hit"], made)


_REDUCED = tuple(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16"))
_MATMUL = ("fp32_precision", *_REDUCED)


def compile_settings() -> bytes:
    """Settings of this process that are part of cache keys, for a process that finds or fills the
    caches. Includes the system: a process that sees no GPU would have other keys."""
    settle_cache_keys()
    matmul = torch.backends.cuda.matmul
    return pickle.dumps(
        {
            "inductor": inductor_config.save_config_portable(ignore_private_configs=False),
            "functorch": functorch_config.save_config_portable(ignore_private_configs=False),
            "system": codecache.CacheBase.get_system(),
            "matmul": {name: getattr(matmul, name) for name in _MATMUL},
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            ),
            "dtype": torch.get_default_dtype(),
        }
    )


def use_compile_settings(given: bytes) -> None:
    """Apply another process's settings to this process."""
    settle_cache_keys()
    settings = pickle.loads(given)
    _use(settings)
    base: Any = codecache.CacheBase
    base.get_system = staticmethod(lambda: settings["system"])


@contextmanager
def compile_settings_in_use(given: bytes) -> Iterator[None]:
    """A context with this process's settings as recorded in `given`."""
    before = pickle.loads(compile_settings())
    _use(pickle.loads(given))
    try:
        yield
    finally:
        _use(before)


def _use(settings: dict[str, Any]) -> None:
    for config, name in ((inductor_config, "inductor"), (functorch_config, "functorch")):
        for key, value in settings[name].items():
            if functools.reduce(getattr, key.split("."), config) != value:
                setattr(config, key, value)
    for name, value in settings["matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)
    enabled, warn_only, fill = settings["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.set_default_dtype(settings["dtype"])
