"""A call of a captured graph: inputs that share memory, calls alike, and what is recalled.

What is recalled of a graph is what running all of it finds.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.ir.capture import Ambient, Capture
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.propagate import Values, propagate
from megacompile.runtime.model.input_keys import LastCall
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.params.shared_memory import moved, overlaps
from tests import capturing
from tests.capturing import capture as dynamo
from tests.capturing import node, of_params, traced


def text(seed: int = 0) -> Tensor:
    return torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(seed))


def test_inputs_move_once_and_stay_what_they_are() -> None:
    x, stays = torch.ones(3), torch.zeros(3)
    around, beside = {"x": [x, stays]}, [stays]
    called, named = (x, around, beside), {"labels": x}
    args, kwargs = moved(called, named, lambda t: t if t is stays else t + 1)
    assert args[0] is args[1]["x"][0] is kwargs["labels"] and args[0] is not x
    assert args[1]["x"][1] is stays and args[2] is beside, "only what moves is another one"
    assert around["x"][0] is x, "the caller's is as it was"


def test_overlaps_are_those_of_what_is_changed() -> None:
    tokens, x = text(), torch.ones(4)
    args = [tokens[:, :-1], x, tokens[:, 1:], x[:2]]
    assert overlaps(args, frozenset({2}), []) == ((0, 2),)
    assert overlaps([x, x[1:2], x[3:]], frozenset({2}), []) == ((0, 1, 2),), "within the first"
    assert overlaps(args, frozenset(), []) == ()
    assert overlaps(args, frozenset({3}), []) == ((3, 1),)


AMBIENT = Ambient.current(torch.device("cpu"))
PROGRAM: Any = object()
MEMORY = torch.zeros(8)
STATISTIC, BATCH, ELSEWHERE = MEMORY[:4], torch.ones(2, 3), torch.zeros(4)
CHANGED = frozenset({0})  # the statistic


def call(position: int | None = None, value: object = None) -> list[Any]:
    """The inputs of a call, or of one with another value of one of them."""
    args: list[Any] = [STATISTIC, BATCH, 3, 0.5, True]
    if position is not None:
        args[position] = value
    return args


@pytest.mark.parametrize(
    ("args", "is_like"),
    [
        (call(1, torch.zeros(2, 3)), True),
        (call(0, MEMORY[:4]), True),  # another view of the same memory
        (call(1, torch.zeros(2, 4)), False),
        (call(1, torch.zeros(3, 2).t()), False),
        (call(1, torch.zeros(2, 3, dtype=torch.float64)), False),
        (call(1, torch.zeros(2, 3, requires_grad=True)), False),
        (call(1, nn.Parameter(torch.zeros(2, 3), requires_grad=False)), False),
        (call(1, MEMORY[2:].as_strided((2, 3), (3, 1))), False),
        (call(0, ELSEWHERE), False),
        (call(2, 4), False),
        (call(2, 3.0), False),
        (call(3, -0.5), False),
        (call(4, 1), False),
        (call()[:-1], False),
    ],
)
def test_what_makes_a_call_another_one(args: list[Any], is_like: bool) -> None:
    last = LastCall(PROGRAM, AMBIENT, call(), CHANGED)
    assert last.is_usable and last.program is PROGRAM
    assert last.is_like(AMBIENT, args, CHANGED) is is_like
    assert not last.is_like(replace(AMBIENT, grad_enabled=False), args, CHANGED)
    assert not last.is_like(AMBIENT, args, frozenset({0, 1}))
    if args[0] is ELSEWHERE:
        in_place = LastCall(PROGRAM, AMBIENT, call(), frozenset())
        assert in_place.is_like(AMBIENT, args, frozenset()), "nothing is changed in place"


@pytest.mark.parametrize("odd", [torch.zeros(3, requires_grad=True), "text", None, (1, 2)])
def test_a_call_of_other_kinds_of_inputs_has_its_key_made_each_time(odd: Any) -> None:
    assert not LastCall(PROGRAM, AMBIENT, [*call(), odd], CHANGED).is_usable


def streamed(param: nn.Parameter) -> StreamedParameter:
    proxy = StreamedParameter(param.detach(), torch.device("cpu"))
    proxy.param = param
    return proxy


def test_the_same_parameters_make_the_same_call_and_nothing_is_kept_alive() -> None:
    param, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    args: list[Any] = [streamed(param), torch.zeros(2, 3)]
    made = LastCall(PROGRAM, AMBIENT, args, CHANGED)
    assert made.is_usable and made.is_like(AMBIENT, args, CHANGED)
    assert not made.is_like(AMBIENT, [streamed(other), BATCH], CHANGED)
    assert not made.is_like(AMBIENT, [BATCH, args[0]], CHANGED)
    gone = [weakref.ref(arg) for arg in args]
    args.clear()
    assert [each() for each in gone] == [None, None]
    assert not made.is_like(AMBIENT, [BATCH, BATCH], CHANGED)


X = TensorMeta((4, 6), torch.float32, (6, 1), requires_grad=True)
ROWS = capturing.symbol("n0")
Y = capturing.sized(X, ROWS, 6)  # X, with any number of rows


def told(values: Values) -> dict[str, Any]:
    """All of it, storages by who has them; without the object of an autocast region."""
    holders: dict[int, set[str]] = defaultdict(set)
    for n, keys in values.storages.items():
        for key in keys:
            holders[key].add(n.name)
    shared = {key: tuple(sorted(names)) for key, names in holders.items()}
    return {
        "of": {n.name: value for n, value in values.of.items() if "autocast" not in n.name},
        "storages": sorted(shared.values()),
        "mutates": {n.name: {shared[k] for k in keys} for n, keys in values.mutates.items()},
        "same": {n.name: other.name for n, other in values.same_as.items()},
        "grad": {n.name: m.name for n, m in values.requires_grad_after.items()},
        "conditions": values.symbols
        and sorted({str(guard.expr) for guard in values.symbols.fakes.env.guards}),
    }


def run(capture: Capture, *, recall: bool = True) -> tuple[dict[str, Any], int]:
    """What is found, and how many calls are run for it."""
    ran: list[fx.Node] = []
    base = fx.Interpreter.run_node

    def counted(self: fx.Interpreter, n: fx.Node) -> Any:
        if n.op.startswith("call_"):
            ran.append(n)
        return base(self, n)

    with mock.patch.object(fx.Interpreter, "run_node", counted):
        return told(propagate(capture, recall=recall)), len(ran)


def layers(x: Any) -> Any:
    for _ in range(5):
        y = x.transpose(0, 1).contiguous()
        x = x + (y @ x).mean() + torch.relu(x)
    return x


def views(x: Any) -> Any:
    found = []
    for _ in range(3):
        parts = (x * 2).chunk(2, 1)
        a, b = parts[0], parts[1]
        x = torch.cat([b.view(4, 3), a.reshape(4, 3)], 1)
        found += [a, x.view(-1), x.expand(2, 4, 6)]
    return found


def same(x: Any) -> Any:
    for _ in range(3):
        x = x.contiguous().to(torch.float32).contiguous() + 1
    return x


def in_place(x: Any) -> Any:
    total = torch.zeros_like(x)
    for _ in range(3):
        x = x * 2
        total.add_(x)
        x.mul_(3)
    return x + total


def view_of_changed(x: Any) -> Any:
    """The second view is known of the first, and its base is written to."""
    out = []
    for _ in range(3):
        y = x * 1
        flat = y.view(-1)
        y.add_(1)
        out.append(flat + 1)
    return out


def modes(x: Any) -> Any:
    out = []
    for on in (True, False, True, False):
        node(x, torch._C._set_grad_enabled, on)
        y = torch.relu(x)
        out += [y, y.view(-1), x.view(-1)]
    node(x, torch._C._set_grad_enabled, True)
    return out


def autocast(x: Any) -> Any:
    out, mode = [], torch.amp.autocast_mode
    for on in (True, False, True):
        region = node(x, mode._enter_autocast, "cpu", torch.bfloat16, on, False)
        out.append(x @ x.t())
        node(x, mode._exit_autocast, region)
    return out


def cut_off(x: Any) -> Any:
    """A view that is cut off is not like one without grad."""
    node(x, torch._C._set_grad_enabled, False)
    cut = x.view(-1)
    node(x, torch._C._set_grad_enabled, True)
    return [torch.relu(each) for each in (x.detach().view(-1), cut)]


def late_grad(x: Any) -> Any:
    """What is made of zeros requires grad after a part of it was set."""
    out = []
    for _ in range(2):
        y = torch.zeros_like(x)
        y[0].copy_(x[0])
        out.append(y * 2)
    return out


def numbered(x: Any, n: Any) -> Any:
    """What layers do with numbers: computed, asked for, in slices and in sizes of what is made."""
    for _ in range(5):
        half = x[: x.size(0) - n // 2]
        x = torch.cat([half, x[: n // 2]]) * n + torch.arange(n)[:, None]
        x = x.reshape(-1).view(n, 6)
    return x


def several(x: Any, n: Any) -> Any:
    """Another number is another operation."""
    return [x[:1].expand(k, 6) for k in (n, n + 1, n * 2, n + 1)]


FUNCTIONS = [layers, views, same, in_place, view_of_changed, modes, autocast, cut_off, late_grad]
WITH_SYMBOLS = [layers, views, in_place, view_of_changed]
Function = Callable[..., Any]


def with_numbers(function: Function) -> Capture:
    """A capture that takes a tensor with symbols, and the symbol, as Dynamo has it."""
    number = capturing.number("n0", 4)
    if function in (numbered, several):
        return traced(function, Y, number)
    return traced(lambda x, n: function(x), Y, number)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_recalled_is_what_runs(function: Function) -> None:
    for capture in (traced(function, X), of_params(traced(function, X))):
        (plain, many), (recalled, few) = run(capture, recall=False), run(capture)
        assert recalled == plain
        if function in (view_of_changed, late_grad):  # all of it is run, after what was recalled
            assert few > many
        else:
            assert few < many if function in (layers, views, same) else few <= many


@pytest.mark.parametrize("function", [numbered, several, *WITH_SYMBOLS])
def test_with_symbols_the_same_is_found_for_the_same_sizes(function: Function) -> None:
    capture = with_numbers(function)
    (plain, many), (recalled, few) = run(capture, recall=False), run(capture)
    assert recalled == plain
    assert (few > many) == (function is view_of_changed)
    if function is numbered:
        assert few < many / 2
    if function is several:
        found = [v.symbolic.shape[0] for k, v in recalled["of"].items() if "expand" in k]
        assert found == [ROWS, ROWS + 1, 2 * ROWS, ROWS + 1]


def test_equal_layers_run_once() -> None:
    for capture in (traced(layers, X), with_numbers(layers)):
        assert [run(capture, recall=each)[1] for each in (False, True)] == [35, 7]
    # a function that is left whole: all but what makes their configurations, of which each has two
    captures = [dynamo(capturing.Model(count), torch.ones(2, 4)).capture for count in (2, 5)]
    few, many = (run(each)[1] for each in captures)
    assert many - few == 3 * 2
