"""Dynamo's options, caches and logs, and functions that it must not capture."""

from __future__ import annotations

import concurrent.futures.process  # noqa: F401  torch imports it lazily: too late as main ends
import functools
import inspect
import logging
import operator
import re
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import cached_backends, skip_code
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.utils import counters
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

_F = TypeVar("_F", bound=Callable[..., Any])

CALL_OPTIONS = {
    "skip_nnmodule_hook_guards": False,  # recaptures if a module's hooks change
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # and if two parameters become one
    "optimize_ddp": False,  # no split at DistributedDataParallel's buckets
    "recompile_limit": 256,  # instead of 8
    "accumulated_recompile_limit": 4096,
    "allow_rnn": False,  # nn.LSTM fits into no stage (docs/limits.md)
}
if hasattr(torch._dynamo.config, "force_compile_during_fx_trace"):
    CALL_OPTIONS["force_compile_during_fx_trace"] = True  # another thread may trace a stage


# An operator rejects its inputs (a product of mismatched shapes), or Dynamo itself fails (it needs
# a number and has a symbol).
CAPTURE_ERRORS = (
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.InternalTorchDynamoError,
    AssertionError,
)

# The original function inside `torch.compile(function)`.
uncompiled: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_torchdynamo_orig_callable")


# Dynamo's compile lock. FX's tracing flag is process-wide: two tracers that do not end in reverse
# order leave it set.
compile_lock: AbstractContextManager[object] = convert_frame.compile_lock


_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def hide_fake_errors(undos: list[Callable[[], object]]) -> None:
    """Leave out pages of torch's log about an operator that refuses its inputs during a capture.
    The code runs eagerly then, and raises the plain error. `undos` shows them again."""
    undos.append(functools.partial(setattr, _FAKES, "disabled", _FAKES.disabled))
    _FAKES.disabled = True


def dynamo_options() -> dict[str, Any]:
    """Current values of the Dynamo options in `CALL_OPTIONS`, as torch stores them."""
    if _OPTIONS:
        return {name: variable.get() for name, variable in _OPTIONS.items()}
    return {name: getattr(torch._dynamo.config, name) for name in CALL_OPTIONS}


def set_dynamo_options(options: Mapping[str, Any]) -> None:
    """Restore values that `dynamo_options` returned (since torch 2.12: for this thread)."""
    if not _OPTIONS:
        for name, value in options.items():
            setattr(torch._dynamo.config, name, value)
        return
    for name, value in options.items():
        _OPTIONS[name].set(value)
    config: Any = torch._dynamo.config
    config._hash_dirty_var.set(True)
    config._get_dict_dirty_keys_var.set(None)  # all of them


def _kept_options() -> dict[str, Any]:
    """The context variables of the options in `CALL_OPTIONS`; empty if torch stores them in another
    way. Setting each option by name takes as long as the guards of a small model."""
    config: Any = torch._dynamo.config
    names = ("_hash_dirty_var", "_get_dict_dirty_keys_var")
    if not all(isinstance(getattr(config, name, None), ContextVar) for name in names):
        return {}
    entries = [config._config[name] for name in CALL_OPTIONS]
    others = ("alias", "hide", "deprecated")  # setting an option by name handles them
    if any(getattr(entry, name, None) for entry in entries for name in others):
        return {}
    kept = {name: entry.user_override for name, entry in zip(CALL_OPTIONS, entries, strict=True)}
    return kept if all(isinstance(each, ContextVar) for each in kept.values()) else {}


_OPTIONS = _kept_options()


# A context in which Dynamo does not collect garbage after each compilation.
without_collecting: Callable[[], AbstractContextManager[object]] = functools.partial(
    torch._dynamo.config.patch, run_gc_after_compile=False
)


def forget_compiled(code: types.CodeType, backend: Callable[..., Any]) -> None:
    """Removes Dynamo's caches of a function that no longer exists: its backend, and the finalizers
    of its guards on objects that live on (a class, a module), which keep the guards alive."""
    frame: Any = torch._C._dynamo.eval_frame
    gone = {id(entry.guard_manager) for entry in frame._debug_get_cache_entry_list(code)}
    torch._dynamo.reset_code(code)  # type: ignore[attr-defined]
    for key, kept in list(cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            del cached_backends[key]
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer, info in registry.copy().items():  # threads add to it
        owner = getattr(getattr(info.func, "func", None), "__self__", None)
        if isinstance(owner, CheckFunctionManager):
            guards = getattr(owner, "guard_manager", None)
            if id(guards) in gone or isinstance(guards, DeletedGuardManagerWrapper):
                finalizer.detach()


def forget_missing() -> None:
    """Removes Dynamo's guards on missing attributes. On torch 2.11, a guard on `not hasattr(module,
    "x")` raises in a guard filter, and leaves the module in a table that all captures share."""
    table = torch._dynamo.guards._get_closure_vars()
    for name in [name for name in table if re.fullmatch(r"tmp\d*", name)]:
        del table[name]


def capture_symbolic_as(
    stock: Callable[..., Any],
    instead: Callable[..., Any],
    wanted: Callable[[], bool],
    *,
    of_sizes: bool = True,
) -> None:
    """Makes Dynamo capture `instead` for `stock` if an argument is or has a symbolic number
    (`of_sizes`: or a symbolic size), and `instead` can take the call. `wanted` is called at each
    capture, in its thread."""
    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    if stock in handlers:
        return

    def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        del variable
        if not wanted() or not any(_has_symbols(v, of_sizes) for v in (*args, *kwargs.values())):
            return None  # captures `stock`
        try:
            inspect.signature(instead).bind(*args, **kwargs)
        except TypeError:
            return None
        return SourcelessBuilder.create(tx, instead).call_function(tx, list(args), kwargs)

    handlers[stock] = handle


def _has_symbols(variable: Any, of_sizes: bool) -> bool:
    """True if a Dynamo variable is a symbol, contains one, or has a symbolic size."""
    if isinstance(variable, BaseListVariable):
        return any(_has_symbols(item, of_sizes) for item in variable.items)
    if isinstance(variable, TensorVariable):
        example = variable.as_proxy().node.meta.get("example_value") if of_sizes else None
        return any(isinstance(n, torch.SymInt) for n in getattr(example, "shape", ()))
    return isinstance(variable, SymNodeVariable)


def captured_so_far() -> tuple[int, int]:
    """(graphs that Dynamo captured, frames that it processed) so far in this process."""
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def log_recompiles() -> str:
    """Makes Dynamo log at DEBUG why it recompiles; returns the logger's name.
    `torch._logging.set_logs()` would replace the handlers of all torch loggers."""
    torch._logging._internal.log_state.artifact_names.add("recompiles")
    return "torch._dynamo.guards.__recompiles"


def tracer_around() -> str:
    """Name of the tracer of this call, other than Dynamo; "" if there is none."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    return ""


def opaque(
    function: Callable[..., Any],
    *,
    reason: str = "it is part of megacompile, which runs in eager code",
    on_capture: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """A function that breaks the graph and runs in eager code, with all that it calls, when Dynamo
    captures a caller. `reason` is shown in Dynamo's error if the graph must not break
    (`fullgraph=True`); `on_capture` is called with the first argument under Dynamo."""
    working: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback
    alone = torch.compiler.disable(function, reason=reason)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not callable(working()):
            return function(*args, **kwargs)
        if on_capture is not None:
            on_capture(args[0])
        return alone(*args, **kwargs)

    skip_code(call.__code__)
    functools.update_wrapper(call, function)
    for name, value in vars(alone).items():
        if name.startswith("_torchdynamo_disable"):
            setattr(call, name, value)
    return call


def within_callers(function: _F) -> _F:
    """A function that Dynamo captures only as part of its callers. If a callee breaks the graph,
    tracing this frame up to there is wasted work: Dynamo captures the callee by itself."""
    skip_code(function.__code__)
    return function


def compiled_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Callable[..., Any]:
    """`torch.compile(function)` for arguments like these, of any size, as a plain function. It runs
    Dynamo's code without guards, and `torch.compiler.reset()` does not remove it."""
    fresh = _function_of(function.__code__.replace(), function, function.__globals__)
    torch.compile(fresh, dynamic=True, fullgraph=True, options=options)(*args, **kwargs)
    frame: Any = torch._C._dynamo.eval_frame
    (entry,) = frame._debug_get_cache_entry_list(fresh.__code__)  # a new code object: one entry
    return _function_of(entry.code, function, dict(function.__globals__))  # keeps Dynamo's names


def _function_of(
    code: types.CodeType, like: Callable[..., Any], names: dict[str, Any]
) -> types.FunctionType:
    assert isinstance(like, types.FunctionType)
    new = types.FunctionType(code, names, like.__name__, like.__defaults__, like.__closure__)
    new.__kwdefaults__ = like.__kwdefaults__
    return new
