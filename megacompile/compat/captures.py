"""Inspects graphs that Dynamo captured, and their guards."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch.utils.checkpoint import checkpoint

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_TRANSFORMS = tuple(
    f"torch.{name}"
    for name in ("_C._functorch", "_functorch.predispatch", "_functorch.eager_transforms")
)

# The nodes that Dynamo writes for grad mode and autocast.
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # torch 2.11 to 2.15
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast  # torch 2.11 to 2.15

# The operator that Dynamo writes for torch.utils.checkpoint, and the keywords that are its own.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint  # torch 2.11 to 2.15
_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)
CHECKPOINT_OPTIONS = _OPTIONS | {"preserve_rng_state"}  # torch 2.11 to 2.15

# What torch.nn.functional.cross_entropy calls.
CROSS_ENTROPY_LOSS: Callable[..., Any] = torch._C._nn.cross_entropy_loss  # torch 2.11 to 2.15


# What Dynamo writes for torch.vmap, from BEGIN to END; what it loads first is needed once.
VMAP_LOAD = predispatch.lazy_load_decompositions  # torch 2.11 to 2.15
VMAP_BEGIN = predispatch._vmap_increment_nesting  # torch 2.11 to 2.15
VMAP_END = predispatch._vmap_decrement_nesting  # torch 2.11 to 2.15
_VMAP = (VMAP_LOAD, VMAP_BEGIN, VMAP_END, predispatch._add_batch_dim, predispatch._remove_batch_dim)


def transforms(module: fx.GraphModule) -> str | None:  # torch 2.11 to 2.15
    """The first node of `torch.func.grad` and its like in a captured graph.

    They count their nesting in global state, which a trace that fails would leave changed. `vmap`
    counts too; it is put right by `keeping_nesting`, in the graph and in its checkpoints.
    """
    plain = set(_with_checkpoints(module))
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                of_transforms = str(getattr(node.target, "__module__", "")).startswith(_TRANSFORMS)
                if of_transforms and not (inner in plain and node.target in _VMAP):
                    return str(node)
    return None


def put_inputs_first(module: fx.GraphModule) -> None:  # torch 2.11 to 2.15
    """Move the placeholders of a captured graph to its front, in their order. Torch 2.11 puts that
    of a size where an `autograd.Function` needed it last."""
    nodes = list(module.graph.nodes)
    first = next((k for k, node in enumerate(nodes) if node.op != "placeholder"), len(nodes))
    for node in nodes[first:]:
        if node.op == "placeholder":
            nodes[first].prepend(node)


def has_while_loop(module: fx.GraphModule) -> bool:  # torch 2.11 to 2.15
    """Is there a `while_loop` in a captured graph? Its fake kernel makes symbols of its own."""
    loop = torch.ops.higher_order.while_loop
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    return any(graph.find_nodes(op="call_function", target=loop) for graph in graphs)


def _with_checkpoints(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A graph and the bodies of its checkpoints, which are inlined."""
    yield module
    for node in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
        yield from _with_checkpoints(getattr(module, str(node.args[0].target)))


@contextmanager
def keeping_nesting() -> Iterator[None]:  # torch 2.11 to 2.15
    """Leave what a vmap that fails has entered in this block."""
    level = torch._C._functorch.maybe_current_level
    before = level() or 0
    try:
        yield
    finally:
        while (level() or 0) > before:
            VMAP_END()


def module_calls(node: fx.Node) -> list[tuple[int, str]]:  # torch 2.11 to 2.15
    """The modules a captured node ran in, outermost first: (id of the module, which call of it)."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key in stack:
        module_id, _, call = str(key).partition("@")
        if module_id.isdigit():
            calls.append((int(module_id), call))
    return calls


def is_of_capture(frame: types.FrameType) -> bool:  # torch 2.11 to 2.15
    """True if a frame is a graph's generated code, or Dynamo at work."""
    generated = "eval_with_key" in frame.f_code.co_filename
    return generated or frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"


def is_of_user(frame: types.FrameType) -> bool:  # torch 2.11 to 2.15
    """True if the code of a frame is neither ours nor torch's."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "megacompile")


def is_asked_by_user() -> bool:  # torch 2.11 to 2.15
    """True if the caller is called by a user's code, or by a Python method that a user called."""
    frame = sys._getframe(2)
    return is_of_user(frame) or frame.f_globals.get("__name__") == "torch._tensor"


def is_called_first(code: types.CodeType) -> bool:  # torch 2.11 to 2.15
    """True if a call of this code came here without a line of a user, except captured ones.

    What runs in a frame that Dynamo resumed has another graph before it.
    """
    return _has_begun(code, sys._getframe(1)) is False


def has_begun(code: types.CodeType, following: types.CodeType) -> bool:  # torch 2.11 to 2.15
    """Is a call of this code under way in which a line of a user has run? `following` runs next."""
    return _has_begun(code, sys._getframe(1), begun=_is_resumed(following)) is True


def _has_begun(
    code: types.CodeType, frame: types.FrameType | None, *, begun: bool = False
) -> bool | None:
    """Has a line of a user run between this frame and a call of this code? None: there is none."""
    while frame is not None and frame.f_code is not code:
        begun |= _has_run(frame)
        frame = frame.f_back
    return None if frame is None else begun


def is_raised_first(error: BaseException) -> bool:  # torch 2.11 to 2.15
    """Was an error that was caught here raised by Dynamo, before a line of a user has run? What is
    raised in a frame that Dynamo resumed has another graph before it."""
    at, captures = error.__traceback__, False
    while at is not None:
        if _has_run(at.tb_frame):
            return False
        captures |= at.tb_frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        at = at.tb_next
    return captures


def _has_run(frame: types.FrameType) -> bool:
    """True if a frame on a stack shows that a line of a user has run, here or before a graph
    break."""
    return is_of_user(frame) or _is_resumed(frame.f_code)


def _is_resumed(code: types.CodeType) -> bool:
    """True if Dynamo made this code of the lines after a graph break."""
    return users_name(code.co_name) != code.co_name


def users_name(name: str) -> str:  # torch 2.11 to 2.15
    """The user's name of a function, from that of its lines after a graph break:
    "forward" of "torch_dynamo_resume_in_forward_at_12"."""
    return _RESUMED.sub(r"\1", name)


def quiet_within(code: types.CodeType) -> None:  # torch 2.11 to 2.15
    """Within calls of this code, torch does not log the traceback of an operator that refuses its
    fake inputs: the error that is raised says it too."""
    if not _quiet:
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_outside)
    _quiet.add(code)


def _is_outside(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith("failed while attempting to run meta"):
        return True
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _quiet:
        frame = frame.f_back
    return frame is None


_quiet: set[types.CodeType] = set()


# What Dynamo's guard filters see of its guards on what a tensor subclass is made of.
SUBCLASS_GUARD = "TENSOR_SUBCLASS_METADATA_MATCH"  # torch 2.11 to 2.15
INNER_NAMES = ".__tensor_flatten__()[0]"  # torch 2.11 to 2.15
