"""What is said of capture, in full: how to provoke it, the class, and the text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import schedules
from megacompile.errors import BackwardError
from tests.equality import nets
from tests.equality.nets import streamed
from tests.messages.said import assert_says, heard
from tests.zoo import stacks


class Function(nn.Module):
    """A layer, and a function of it and what it gives."""

    def __init__(self, function: Callable[[Any, Tensor], Any], width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.function = function
        self.name = ""

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def untraced() -> None:
    streamed(Function(lambda m, x: nets.real_only(x.detach()) + x))(torch.ones(2, 4))


def counted(module: Any, x: Tensor) -> Tensor:
    return x * len(module.name)


def another_case() -> None:
    model = streamed(Function(counted))
    for i in range(18):
        model.name = f"case {i}"
        model(torch.ones(2, 4))


def far_between() -> None:
    model = streamed(Function(counted))
    for i in range(10):
        model.name = f"case {i}"
        for _ in range(3):
            model(torch.ones(2, 4))


def a_part_by_itself() -> None:
    part = Function(counted)
    model = streamed(nn.Sequential(part, nn.Linear(4, 4)))
    model(torch.ones(2, 4))
    for i in range(9):
        part.name = f"case {i}"
        part(torch.ones(2, 4))


def asked_size() -> None:
    model = streamed(Function(lambda m, x: nets.asks_in_backward(x)))
    for rows in range(2, 12):
        model(torch.ones(rows, 4)).sum().backward()


def clamped(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.layer.weight.clamp_(-0.1, 0.1)
    return module.layer(x)


def unscheduled() -> None:
    streamed(Function(clamped))(torch.ones(2, 4))


def wrong_dtype() -> None:
    with contextlib.suppress(RuntimeError):  # torch's own, in eager mode
        streamed(Function(lambda m, x: x))(torch.ones(2, 4, dtype=torch.float64))


def hooked_output() -> None:
    model = streamed(Function(lambda m, x: (m.layer(x), x)))
    for _ in range(2):
        result, hidden = model(torch.ones(3, 4))
        hidden.retain_grad()
        (result.sum() + hidden.sum()).backward()


def logits() -> None:
    def both(module: Any, x: Tensor) -> Any:
        scores = module.layer(x)
        return F.cross_entropy(scores, torch.tensor([0, 1])), scores

    streamed(Function(both), head="chunked")(torch.ones(2, 4))


def shared() -> None:
    def fills(module: Any, x: Tensor) -> Tensor:
        module.seen.mul_(2)
        return x

    model = streamed(Function(fills))
    model.seen = model.layer.weight.data[:2]
    model(torch.ones(2, 4))


def compiled() -> None:
    _, model, inputs = stacks()
    made: Any = torch.compile(model, backend="eager")
    made(**inputs)


def compiled_method() -> None:
    _, model, _ = stacks()
    model.compile(backend="eager")
    model.compile()


def fullgraph() -> None:
    _, model, inputs = stacks()
    torch.compile(lambda: model(**inputs) * 2, backend="eager", fullgraph=True)()


def later_backward() -> None:
    def two(module: Any, x: Tensor) -> Any:
        return x.square().sum(), torch.var(x, correction=60)

    model = streamed(Function(two))
    for rows in (18, 20, 5):
        model(torch.ones(rows, 4))[0].backward()
    model(torch.ones(5, 4))[1].backward()


def changed_output() -> None:
    out = streamed(Function(lambda m, x: x.exp()))(torch.ones(2, 4))
    out.mul_(2)
    out.sum().backward()


# How it is provoked, its class, its text.
SLOWER = "(slower, same numbers; shown once)"
ANEW = f"was captured again in 8 of its last 8 calls, which took {{}} s {SLOWER}: "
GUARD = "a condition of earlier captures did not hold (model.name == 'case {}'); "
FEWER = (
    "keep it constant from call to call, pass it as an argument or a tensor, or make such calls in "
    "`with megacompile.eager(model):`"
)
THERE = "at each use, unless they are on the device"
BOTH = f"fetching 2 of 2 parameters (80 B of 80 B, 100 %) {THERE} (slower, same numbers)"
FILE = __file__

ROWS: list[tuple[Callable[[], None], type[Exception], str]] = [
    (untraced, UserWarning,
        f"megacompile: {FILE}:{{}} (forward) runs in eager mode and fetches 2 of 2 parameters "
        f"(80 B of 80 B, 100 %) {THERE} {SLOWER}: Dynamo could not trace {FILE}:{{}} (<lambda>): "
        "megacompile_tests.real_only.default: RuntimeError('no fake tensors here'); "
        "TORCH_LOGS=+dynamo shows more"),
    (another_case, UserWarning, f"megacompile: Function {ANEW}{GUARD}{FEWER}"),
    (a_part_by_itself, UserWarning, f"megacompile: Sequential {ANEW}{GUARD}{FEWER}"),
    (asked_size, UserWarning,
        f"megacompile: Function {ANEW}other sizes need their own code: the stage Function, with "
        "its backward relies on Eq(n0, {}); pad to a few sizes"),
    (unscheduled, UserWarning,
        f"megacompile: Function is not scheduled and runs in eager mode, {BOTH}: parameter "
        "'layer.weight' is changed in place by clamp_"),
    (shared, UserWarning,
        f"megacompile: Function is not scheduled and runs in eager mode, {BOTH}: inputs "
        "share memory, with a parameter or one another, and one is changed in place; pass copies "
        "(.clone())"),
    (wrong_dtype, UserWarning,
        f"megacompile: Function is not scheduled and runs in eager mode, {BOTH}: stage 'Function': "
        "input 0 is f64[2, 4], its parameters f32: mat1 and mat2 must have the same dtype, but got "
        "Double and Float"),
    (hooked_output, UserWarning,
        "megacompile: Function: output 1 has a hook, or retains its gradient, and other outputs "
        "are computed from it: gradients through those do not reach the hook, and its changes "
        "do not reach them (numbers differ from the plain model's; shown once); call "
        "torch._dynamo.graph_break() after the line that computes it"),
    (logits, UserWarning,
        "megacompile(): Function: head='chunked', but the head is whole: the logits (scores) are "
        "returned to the caller; return the loss"),
    (compiled, UserWarning,
        "megacompile: Stack is called from code that torch.compile captures, which skips the "
        "model: megacompile compiles it (shown once); leave out torch.compile if it wraps only "
        "the model"),
    (compiled_method, UserWarning,
        "megacompile: Stack.compile() does nothing: megacompile compiles the model (shown once); "
        "leave it out"),
    (fullgraph, torch._dynamo.exc.Unsupported,
        "{}reason: megacompile compiles this model itself; leave out fullgraph=True, or "
        "torch.compile){}"),
    (later_backward, BackwardError,
        "Function.1: a backward for these outputs has no code for the sizes 5; call "
        "megacompile(model, dynamic=False), so that each set of sizes gets its own"),
    (changed_output, BackwardError,
        "Function: an output of shape (2, 4) was changed in place since the forward, and the "
        "backward needs its old value; change a copy (.clone()), or call backward() first"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:var..:UserWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].__name__)
def test_what_is_said(
    row: tuple[Callable[[], None], type[Exception], str], capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing else: torch.fx prints the code of a graph that raises."""
    assert_says(*row)
    assert "forward(self" not in "".join(capfd.readouterr())


def test_nothing_is_said_without_a_reason() -> None:
    """Captures that are far between; steps of a model that is captured."""
    assert heard(far_between) == []
    _, model, inputs = stacks()

    def steps() -> None:
        for _ in range(2):
            model(**inputs).backward()

    assert heard(steps) == []
    assert schedules(model)
