"""Private parts of `nn.Module`: its call, its dicts, `_apply` and copies."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._dynamo import pgo
from torch._dynamo.eval_frame import skip_code
from torch.nn.utils import stateless

from megacompile.compat.distributed import is_sharded

# Methods that `__call__` and `to` go through; a module's own attributes override them.
CALL = "_call_impl"
APPLY = "_apply"
# The attribute with the function that replaces a module's call.
COMPILED_CALL = "_compiled_call_impl"

# The function that replaces a module's call, from `module.compile()` or `megacompile()`.
compiled_call: Callable[[torch.nn.Module], Callable[..., Any] | None] = operator.attrgetter(
    "_compiled_call_impl"
)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace a module's call; None restores it. Copies of the module drop it."""
    module._compiled_call_impl = call


def frame_of(model: torch.nn.Module, name: str) -> types.FunctionType:
    """A function that calls a model with its hooks, for Dynamo to capture: it skips frames of
    torch.nn itself (`nn.Sequential`). It records changed sizes by a function's file and name. One
    model's sizes must not make another's symbolic: live functions have distinct names ("name_2"),
    and a reused name starts without records."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    names = itertools.chain([name], (f"{name}_{k}" for k in itertools.count(2)))
    own = next(each for each in names if each not in _frames)
    call.__code__ = call.__code__.replace(co_name=own)
    remembered = pgo.get_code_state() if own in _named else {}
    place = (call.__code__.co_filename, own)
    for key in [key for key in remembered if (key.filename, key.name) == place]:
        del remembered[key]
    _named.add(own)
    _frames[own] = call
    return call


_frames: WeakValueDictionary[str, types.FunctionType] = WeakValueDictionary()  # live, by name
_named: set[str] = set()  # all names so far


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module of a model once, in the order of `model.modules()`, in a fraction of its time.
    Every call of a model needs them: this is host time in every step."""
    modules: dict[int, torch.nn.Module] = {}
    stack: list[Any] = [model]
    while stack:
        module = stack.pop()
        if module is None or id(module) in modules:
            continue
        modules[id(module)] = module
        if children := module._modules:
            stack.extend(reversed(children.values()))
    return list(modules.values())


def holders(modules: Iterable[torch.nn.Module], kind: str) -> list[dict[Any, Any]]:
    """The modules' live dicts of a kind, without empty ones: "parameters", "buffers" or
    "forward_hooks"."""
    name = f"_{kind}"
    return [holder for module in modules if (holder := getattr(module, name))]


# A module's own parameters; the dict is live.
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = (
    operator.attrgetter("_parameters")
)


def convert_in_place(kind: type[torch.Tensor]) -> None:
    """Makes `module.to(...)` and similar methods set the `data` of parameters of this class. torch
    swaps a wrapper subclass for a detached copy, even if nothing changes: autograd would miss its
    later uses. A DTensor that changes is swapped, because it does not support setting `data`."""
    if kind in _CONVERTED_IN_PLACE:
        return
    _CONVERTED_IN_PLACE.append(kind)
    stock: Callable[..., Any] = torch.nn.Module._apply

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if _STAYING.get():
            _convert(self, fn, recurse)
            return self
        own = [p for p in self._parameters.values() if isinstance(p, kind)]
        if torch.compiler.is_compiling() or not own or _is_exchanged(own, fn):
            return stock(self, fn, recurse)
        _convert(self, fn, recurse)
        return self

    skip_code(apply.__code__)  # captured by itself, it would miss the class
    torch.nn.Module._apply = functools.wraps(stock)(apply)  # type: ignore[method-assign]


_STAYING: ContextVar[bool] = ContextVar("_STAYING", default=False)


@contextmanager
def parameters_stay() -> Iterator[None]:
    """A context in which `module.to(...)` and similar methods do not touch parameters that their
    function returns as they are. torch sets the `data` of each, which may wait for its values."""
    token = _STAYING.set(True)
    try:
        yield
    finally:
        _STAYING.reset(token)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _convert(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool) -> None:
    if recurse:
        for child in module.children():
            child._apply(fn)
    with torch.no_grad():
        for param in module._parameters.values():
            if param is None or (converted := fn(param)) is param:
                continue
            if not is_sharded(param):
                param.data = converted
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_exchanged(params: list[torch.nn.Parameter], fn: Callable[[Any], Any]) -> bool:
    """True if torch must swap one of these: a DTensor whose dtype or device changes."""
    sharded = [(param, fn(param)) for param in params if is_sharded(param)]
    return any(p.dtype != to.dtype or p.device != to.device for p, to in sharded)


_CONVERTED_IN_PLACE: list[type[torch.Tensor]] = []


def leave_out_of_copies(*kinds: type) -> None:
    """Leaves attributes of these classes out of copies and pickles of modules. torch leaves out
    `_compiled_call_impl` only, and not for a class with its own `__getstate__` (`nn.LSTM`)."""
    torch.nn.Module.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]
    _LEFT_OUT.extend(kind for kind in kinds if kind not in _LEFT_OUT)


def _reduce_ex(self: torch.nn.Module, protocol: Any) -> Any:
    return _without_left_out(super(torch.nn.Module, self).__reduce_ex__(protocol))


def _without_left_out(value: Any) -> Any:
    """The attributes, or a tuple that contains them, without the classes to leave out."""
    kinds = tuple(_LEFT_OUT)
    if type(value) is tuple:
        made = tuple(map(_without_left_out, value))
        return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
    if type(value) is not dict or not any(isinstance(item, kinds) for item in value.values()):
        return value
    return {name: item for name, item in value.items() if not isinstance(item, kinds)}


_LEFT_OUT: list[type] = []


def given_to_functional_call() -> dict[int, Any]:
    """Tensors, by id, that the enclosing `torch.func.functional_call`s put into modules."""
    code = stateless._functional_call.__code__
    tensors: dict[int, Any] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            given = frame.f_locals["parameters_and_buffers"].values()
            tensors |= {id(value): value for value in given}
        frame = frame.f_back
    return tensors


def without_torch_compile(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside `torch.compile(module)`; any other module unchanged."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model
