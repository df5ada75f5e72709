"""Dynamo: its options, caches and logs; the progress of a call; code that it does not capture."""

from __future__ import annotations

import concurrent.futures.process  # noqa: F401  torch imports it lazily: too late as main ends
import functools
import inspect
import logging
import operator
import os
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import cached_backends, skip_code
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.utils.weak import WeakIdKeyDictionary

from megacompile.compat.patches import replace

_F = TypeVar("_F", bound=Callable[..., Any])

CALL_OPTIONS = {
    "skip_nnmodule_hook_guards": False,  # recaptures if a module's hooks change
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # and if two parameters become one
    "optimize_ddp": False,  # no split at DistributedDataParallel's buckets
    "recompile_limit": 256,  # instead of 8
    "accumulated_recompile_limit": 4096,
    "allow_rnn": False,  # nn.LSTM fits into no stage (docs/limits.md)
    "force_compile_during_fx_trace": True,  # another thread may trace a stage
}

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


_HIDDEN: ContextVar[bool] = ContextVar("_HIDDEN", default=False)
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _HIDDEN.get())


def hide_fake_errors(undos: list[Callable[[], object]]) -> None:
    """Leave out pages of torch's log, in this thread, about an operator that refuses its inputs
    during a capture. The code runs eagerly then, and raises the plain error. `undos` shows them
    again."""
    undos.append(functools.partial(_HIDDEN.set, _HIDDEN.get()))
    _HIDDEN.set(True)


def dynamo_options() -> dict[str, Any]:
    """Current values of the Dynamo options in `CALL_OPTIONS`, as torch stores them."""
    if _OPTIONS:
        return dict(zip(_OPTIONS, map(ContextVar.get, _OPTIONS.values()), strict=True))
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
    """The context variables of the options in `CALL_OPTIONS`; empty before torch 2.12, which has
    none. Setting each option by name takes as long as the guards of a small model."""
    config: Any = torch._dynamo.config
    if not hasattr(config, "_get_dict_dirty_keys_var"):
        return {}
    return {name: config._config[name].user_override for name in CALL_OPTIONS}


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
    stock: Callable[..., Any], instead: Callable[..., Any], wanted: Callable[[], bool]
) -> None:
    """Makes Dynamo capture `instead` for `stock` if an argument is or has a symbolic number, or has
    a symbolic size, and `instead` can take the call. `wanted` is called at each capture, in its
    thread."""
    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    if stock in handlers:
        return

    def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted() or not any(_has_symbols(v) for v in (*args, *kwargs.values())):
            return None  # captures `stock`
        try:
            inspect.signature(instead).bind(*args, **kwargs)
        except TypeError:
            return None
        return SourcelessBuilder.create(tx, instead).call_function(tx, list(args), kwargs)

    handlers[stock] = handle


def _has_symbols(variable: Any) -> bool:
    """True if a Dynamo variable is a symbol, contains one, or has a symbolic size."""
    if isinstance(variable, BaseListVariable):
        return any(_has_symbols(item) for item in variable.items)
    if isinstance(variable, TensorVariable):
        example = variable.as_proxy().node.meta.get("example_value")
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


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def is_of_capture(frame: types.FrameType) -> bool:
    """True if a frame runs a graph's generated code, or Dynamo itself."""
    generated = "eval_with_key" in frame.f_code.co_filename
    return generated or frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"


def is_of_user(frame: types.FrameType) -> bool:
    """True if a frame's code is neither torch's nor megacompile's."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "megacompile")


def is_called_by_user() -> bool:
    """True if user code called the caller, directly or through a Python method of a tensor."""
    frame = sys._getframe(2)
    return is_of_user(frame) or frame.f_globals.get("__name__") == "torch._tensor"


def is_called_first(code: types.CodeType) -> bool:
    """True if a call of this code got here before a line of the user ran, except captured ones.
    False in a frame that Dynamo resumed: another graph ran before it."""
    return _has_begun(code, sys._getframe(1)) is False


def _has_begun(
    code: types.CodeType, frame: types.FrameType | None, *, begun: bool = False
) -> bool | None:
    """True if a line of the user ran between a call of this code and `frame`; None if no call."""
    while frame is not None and frame.f_code is not code:
        begun |= _has_run(frame)
        frame = frame.f_back
    return None if frame is None else begun


def is_raised_first(error: BaseException) -> bool:
    """True if Dynamo raised an error, caught here, before a line of the user ran. False in a frame
    that Dynamo resumed: another graph ran before it."""
    at, captures = error.__traceback__, False
    while at is not None:
        if _has_run(at.tb_frame):
            return False
        captures |= at.tb_frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        at = at.tb_next
    return captures


def _has_run(frame: types.FrameType) -> bool:
    """True if a frame on the stack runs user code, or resumes it after a graph break."""
    return is_of_user(frame) or _is_resumed(frame.f_code)


def _is_resumed(code: types.CodeType) -> bool:
    """True if Dynamo generated this code for the lines after a graph break."""
    return users_name(code.co_name) != code.co_name


def users_name(name: str) -> str:
    """The user's name of a function that Dynamo resumed: "forward" for
    "torch_dynamo_resume_in_forward_at_12"."""
    return _RESUMED.sub(r"\1", name)


_KEPT = 1000  # graph breaks of the process; drops the oldest
_TRIES = 3  # failed traces of one code object: the input may have been the reason


class Uncaptured(NamedTuple):
    """A line of user code that Dynamo could not capture, or that calls code that it could not."""

    file: str  # "" if unknown, or if the whole stack is torch's and megacompile's
    line: int
    function: str
    why: str
    untraced: bool = False  # True: tracing failed; False: a graph break

    @property
    def place(self) -> str:
        """ "file.py:12 (forward)"; "it" if unknown."""
        return f"{self.file}:{self.line} ({self.function})" if self.file else "it"


def _uncaptured(stack: Iterable[tuple[str, Any, str]], why: str) -> Uncaptured:
    """The innermost line of the user in a stack of (file, line, function)."""
    file, line, function = ([at for at in stack if not at[0].startswith(_NOT_USERS)] or [_NONE])[-1]
    return Uncaptured(file, int(line or 0), users_name(function), why)


def note_uncaptured() -> None:
    """Records every graph break from now on, for `graph_breaks`: Dynamo's own list lacks those that
    make it skip a whole function (in a loop, in `try`)."""

    def log_graph_break(stock: Any, self: Any, code_options: Any, reason: str, exc: Any) -> None:
        stack = getattr(exc, "real_stack", None) or torch._guards.TracingContext.extract_stack()
        if stack:
            why = (str(getattr(exc, "msg", "")) or reason).strip().partition("\n")[0]
            _BREAKS.append(_uncaptured(((at.filename, at.lineno, at.name) for at in stack), why))
            _COUNT[0] += 1
        stock(self, code_options, reason, exc)

    replace(InstructionTranslatorBase, "log_graph_break", log_graph_break)


def skip_untraced(
    within: types.CodeType, tracing: Callable[[], AbstractContextManager[None]]
) -> None:
    """Runs untraceable code in eager mode, in calls of the code `within`, if lines of the user have
    already run: such a call cannot start over without Dynamo. Dynamo skips the frame as after a
    graph break. Each trace in such a call runs in a context that `tracing` returns."""

    def convert(stock: Any, self: Any, frame: Any, *args: Any, skip: int = 0) -> Any:
        ours = any(_has_begun(code, sys._getframe()) is not None for code in _within)
        try:
            with tracing() if ours else nullcontext():
                found = stock(self, frame, *args, skip=skip + 2)
        except CAPTURE_ERRORS as error:
            at, begun = sys._getframe(), _is_resumed(frame.f_code)
            if not any(_has_begun(code, at, begun=begun) for code in _within):
                raise
            tries = _untraced.get(frame.f_code, 0)
            _untraced[frame.f_code] = tries + 1
            _BREAKS.append(untraced_by(error))
            _COUNT[0] += 1
            return ConvertFrameReturn(apply_to_code=tries + 1 == _TRIES)
        _untraced.pop(frame.f_code, None)
        return found

    replace(convert_frame.ConvertFrame, "__call__", convert)
    _within.add(within)


def untraced_by(error: Exception) -> Uncaptured:
    """Returns where and why Dynamo raised one of `CAPTURE_ERRORS`, on one line."""
    text = str(error).strip()
    of_operator = re.search(r"with fake tensors: \w+ (.+?)\(\*.*: got (.+)", text)
    why = text.partition("\n")[0] if of_operator is None else ": ".join(of_operator.groups())
    return _uncaptured(_AT.findall(text.partition("from user code:")[2]), why)._replace(
        untraced=True
    )


def graph_breaks() -> tuple[Uncaptured, ...]:
    """Graph breaks since `note_uncaptured`, and failures that `skip_untraced` skipped, newest
    first."""
    return tuple(reversed(_BREAKS))


def uncaptured() -> int:
    """Number of graph breaks and failed traces since `note_uncaptured`."""
    return _COUNT[0]


def why_captured_again(compiled: Callable[..., Any]) -> str:
    """The guard that failed in the newest earlier capture, in Dynamo's words; "" if unknown."""
    failures = torch._dynamo.utils.guard_failures.get(uncompiled(compiled).__code__, [])
    # of the capture with the largest number: 3 for "0/3: ..."
    number: Any = re.compile(r"\d+/(\d+)|").match
    newest = max(failures, key=lambda text: int(number(text)[1] or -1), default="")
    newest = newest.partition("\n")[0]
    return newest.partition(": ")[2].partition("  #")[0].strip()  # without the source line, a hint


_NOT_USERS = tuple(
    os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__))
)
_NONE = "", 0, ""
_AT = re.compile(r'File "(.+)", line (\d+), in (\S+)')  # of a traceback
_COUNT = [0]
_within: set[types.CodeType] = set()
_untraced = WeakIdKeyDictionary()  # code -> failures in a row
_BREAKS: deque[Uncaptured] = deque(maxlen=_KEPT)
