"""What is recalled of a captured graph is what running all of it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from megacompile.ir.capture import Capture
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.propagate import Values, propagate
from tests import handmade, whole
from tests.capturing import capture as dynamo
from tests.handmade import node, of_params, traced

X = TensorMeta((4, 6), torch.float32, (6, 1), requires_grad=True)
ROWS = handmade.symbol("n0")
Y = handmade.sized(X, ROWS, 6)  # X, with any number of rows


def told(values: Values) -> dict[str, Any]:
    """All of it, storages by who has them; without what an autocast region is, which is a new
    object in each run."""
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
    number = handmade.number("n0", 4)
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
    captures = [dynamo(whole.Model(count), torch.ones(2, 4)).capture for count in (2, 5)]
    few, many = (run(each)[1] for each in captures)
    assert many - few == 3 * 2
