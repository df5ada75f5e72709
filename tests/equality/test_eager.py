"""Calls that are not captured, in `megacompile.eager(model)`, and what is resident for them.

Where there is room, what uncaptured code reads lives on the device: then nothing is fetched.
"""

from __future__ import annotations

import copy
import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import megacompile
from megacompile.errors import ModelError
from tests import inside
from tests.equality.nets import Applies, in_a_row, train, with_adamw
from tests.inside import programs, streamed
from tests.zoo import WIDTH as LAYER_WIDTH
from tests.zoo import Stack, assert_same, equal, twins

WIDTH, WORDS = 8, 17
TOKENS = torch.arange(4)[None]


class Net(nn.Module):
    """A language model of a few layers; what a layer adds depends on how many tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.encode(tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x.mean(1, keepdim=True))), 0.5, self.training)
        return x

    def score(self, x: Tensor) -> Tensor:
        return self.head(x)

    def sample(self) -> list[int]:
        """As `generate()`: a method that calls the model."""
        tokens = torch.tensor([[1, 2]])
        for _ in range(12):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens[0].tolist()


def nets() -> tuple[Net, Net]:
    torch.manual_seed(0)
    return twins(Net().eval(), progress=False)


def loss(model: nn.Module, seed: int) -> Tensor:
    """In training; it samples behind that."""
    result: Tensor = model.train()(torch.arange(6)[None]).square().mean()
    model.eval()
    return result


def test_sampling_in_a_block_makes_no_schedule_and_leaves_training_as_it_is() -> None:
    """Also of a model that was never called. Gradients in a block are those of the plain model."""
    models = plain, model = nets()
    pairs = with_adamw(models)
    for step in range(3):
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with megacompile.eager(model):
                assert model.sample() == plain.sample()
        assert len(megacompile.schedules(model)) == min(step, 1)
        train(pairs, loss, [step])
    with megacompile.eager(model):
        train(pairs, loss, [3])

    def of_two_calls(net: Net, seed: int) -> Tensor:
        with megacompile.eager(model):
            first = net(TOKENS)
        return first.sum() + net(torch.arange(5)[None]).square().sum()

    train(pairs, of_two_calls, [4])


def test_modules_and_methods_in_a_block() -> None:
    plain, model = nets()
    with torch.no_grad(), megacompile.eager(model.layers):  # a module stands for the model
        hidden = model.encode(TOKENS)
        assert torch.equal(hidden, plain.encode(TOKENS))
        assert torch.equal(model.score(hidden), plain.score(hidden))
        assert torch.equal(model.forward(TOKENS), plain(TOKENS))
        assert torch.equal(model.layers[2](hidden), plain.layers[2](hidden))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(TOKENS), plain(TOKENS))
    assert streamed(model).captures.graphs == []
    for other in (twin, nn.Linear(2, 2)):
        with pytest.raises(ModelError):
            megacompile.eager(other).__enter__()


def test_blocks_are_nested_end_with_an_exception_and_are_of_one_thread() -> None:
    plain, model = nets()
    graphs = streamed(model).captures.graphs
    outputs: list[Tensor] = []
    with torch.no_grad():
        with megacompile.eager(model):
            with megacompile.eager(model):
                model(TOKENS)
            with pytest.raises(IndexError):
                model(TOKENS + WORDS)
            with pytest.raises(ZeroDivisionError), megacompile.eager(model):
                raise ZeroDivisionError
            model(TOKENS)
            assert graphs == []
            thread = threading.Thread(target=lambda: outputs.append(model(TOKENS).detach()))
            thread.start()
            thread.join()
            captured = len(graphs)
            assert captured
            assert torch.equal(model(TOKENS), plain(TOKENS))
        assert torch.equal(outputs[0], plain(TOKENS))
        assert len(graphs) == captured
        model(torch.arange(5)[None])
        assert len(graphs) > captured


def test_a_block_within_the_forward_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with megacompile.eager(m):
            return m.first(x)

    _, model = twins(in_a_row(forward, count=1))
    with pytest.raises(ModelError, match="Applies"):
        model(torch.ones(1, 4))


def test_calls_that_make_programs_one_after_the_other_are_tried_less_and_less() -> None:
    """Where shapes are new in each call without gradients, as of a cache that grows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x

    plain, model = twins(Applies(forward, layers=Stack(layers=6).layers), dynamic=False)
    made = ""
    with torch.no_grad(), pytest.warns(UserWarning, match="24 schedules"):
        for rows in range(2, 11):
            before = len(programs(model))
            x = torch.ones(rows, LAYER_WIDTH)
            assert equal(model(x), plain(x))
            made += "x" if len(programs(model)) > before else "."
    assert made == "xxxx.x..x"


pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

STATE_WIDTH = 16
KB = 1000


def x_of(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 5, STATE_WIDTH, generator=torch.Generator().manual_seed(seed))


def alone() -> Any:
    return nn.LSTM(STATE_WIDTH, STATE_WIDTH, num_layers=2, batch_first=True)


def pair(made: nn.Module, **options: Any) -> tuple[Any, Any]:
    return twins(made, progress=False, **options)


def loss_of(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.square().mean()


def trained(
    pairs: Any, seeds: range, call: Callable[[Any, Tensor], Any] | None = None
) -> list[int]:
    """How many parameters eager code has copied to the device in each step of `pairs` of a model
    and its optimizer, which are equal in every bit; `call`: of a model."""
    counts = []
    for seed in seeds:
        losses, found = [], list[Any]()
        for model, optimizer in pairs:
            with inside.fetches(found):
                loss = loss_of((call or type(model).__call__)(model, x_of(seed)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        assert equal(*losses), seed
        counts.append(len({id(param) for param in found}))
    assert_same(*(model for model, _ in pairs))
    return counts


def test_a_list_that_a_call_has_made_is_exchanged_in_the_next_call() -> None:
    """A recurrent layer makes the list of its weights in a call, and not in each without
    gradients: they are what it reads, and what it holds behind a call."""
    plain, model = pair(alone(), resident=0, gpu_memory="1MiB")
    for seed in range(3):
        found: list[Any] = []
        with torch.no_grad(), megacompile.eager(model), inside.fetches(found):
            assert all(map(torch.equal, model(x_of(seed))[1], plain(x_of(seed))[1]))
        assert len({id(param) for param in found}) == 8
        assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))


def test_a_tuple_of_parameters_is_exchanged_in_all_modules_that_share_it() -> None:
    """By layers that have no parameters of their own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        found.append([each.pair[0] is m.last.weight for each in (m.first, m.second)])
        return m.second(m.first(x))

    last = nn.Linear(WIDTH, WIDTH)
    shared, found = (last.weight, last.bias), list[list[bool]]()
    first, second = (Applies(lambda m, x: F.linear(x, *m.pair), pair=shared) for _ in range(2))
    models = pair(Applies(forward, first=first, second=second, last=last))
    tuples = [model.first.pair for model in models]
    assert models[1].second.pair is tuples[1]
    with megacompile.eager(models[1]):
        assert equal(*(model(torch.ones(2, WIDTH)) for model in models))
    assert found == [[True, True]] * 2
    with pytest.raises(RuntimeError, match="shape"):
        models[1](torch.ones(2, WIDTH + 1))
    for model, before in zip(models, tuples, strict=True):
        assert model.first.pair is model.second.pair
        assert all(map(operator.is_, model.first.pair, before))


TOWER = 64


class Both(nn.Module):
    """A recurrent layer, and layers that are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(STATE_WIDTH, STATE_WIDTH, batch_first=True)
        self.up = nn.Linear(STATE_WIDTH, TOWER)
        self.layers = nn.ModuleList(nn.Linear(TOWER, TOWER) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(self.recurrent(x)[0])

    def tower(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def recurrent_alone(model: Any, x: Tensor) -> Tensor:
    return model.recurrent(x)[0]


@pytest.mark.parametrize("again", [False, True])
def test_a_captured_graph_that_needs_the_room_gets_it(*, again: bool) -> None:
    """Where it fits beside them they stay. So it is where the model is laid out again before."""
    torch.manual_seed(0)
    for budget, stays in ((400 * KB, True), (120 * KB, False)):
        models = pair(Both(), gpu_memory=budget)
        pairs = with_adamw(models)
        assert trained(pairs, range(3), recurrent_alone)[1:] == [0, 0]
        assert inside.residents(models[1]) == {"recurrent"}
        for model in models if again else ():
            model.other = nn.Linear(1, 1, bias=False).requires_grad_(False)
            nn.init.ones_(model.other.weight)
        counts = trained(pairs, range(3, 7))
        assert ("recurrent" in inside.residents(models[1])) == stays
        assert [bool(count) for count in counts[1:]] == [not stays] * 3
        assert [bool(n) for n in trained(pairs, range(7, 9), recurrent_alone)] == [not stays] * 2


def test_moves_wait_for_backwards_of_eager_code() -> None:
    """Gradients go to where the parameters were in the forward. An old loss that has had its
    backward is not waited for, nor one that nobody has any more."""
    models = plain, model = pair(alone(), gpu_memory="1MiB")
    for each in models:
        optimizer = SGD(each.parameters(), lr=0.1)
        losses = [loss_of(each(x_of(seed))) for seed in range(3)]
        assert not inside.residents(model)
        for loss in reversed(losses):
            loss.backward(retain_graph=loss is losses[0])
        losses.append(loss_of(each(x_of(3))))
        assert not inside.residents(model)
        losses[0].backward()
        optimizer.step()
        assert not inside.residents(model)
        del losses[3]
        losses.append(loss_of(each(x_of(4))))
        assert each is plain or inside.residents(model)
        losses[-1].backward()
    assert_same(plain, model)


def test_parameters_with_hooked_nodes_stay() -> None:
    """One that moved would lose the hook."""
    plain, model = pair(alone(), gpu_memory="1MiB")
    seen: list[list[int]] = [[], []]
    nodes = []
    for each, calls in zip((plain, model), seen, strict=True):
        parameter = each.weight_hh_l0
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, calls=calls: calls.append(1))
        nodes.append(node)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(with_adamw((plain, model)), range(3))
    assert seen[0] == seen[1] and not inside.residents(model)
    assert len(said) == 1, "that they are fetched"


def test_a_loop_that_samples_has_what_it_reads_on_the_device() -> None:
    """Training decides about it later."""
    plain, model = pair(Both(), gpu_memory="4MiB")
    found: list[Any] = []
    with torch.no_grad(), megacompile.eager(model), inside.fetches(found):
        for seed in range(3):
            assert torch.equal(model(x_of(seed)), plain(x_of(seed)))
    assert len(found) == len(list(model.parameters())), "the first call alone"
    assert inside.residents(model) == inside.buckets(model).keys()
    trained(with_adamw((plain, model)), range(3))


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def changes(m: Any, x: Tensor) -> Tensor:
    """Reads, writes, and views that are written through."""
    weight = m.linear.weight
    with torch.no_grad():
        weight.mul_(0.5)
        weight[1].copy_(weight[0])
        m.linear.bias.data = weight[2].clone()
    shared = torch.stack([weight, weight]).sum(0).t()
    return x @ shared + m.linear(x) + weight.flatten()[::STATE_WIDTH].exp()


def test_writes_of_eager_code_reach_a_resident_parameter() -> None:
    made = Applies(changes, linear=nn.Linear(STATE_WIDTH, STATE_WIDTH))
    for options in ({"resident": "all"}, {"gpu_memory": "1MiB"}):
        models = pair(copy.deepcopy(made), **options)
        trained(with_adamw(models), range(4))
        assert inside.residents(models[1]) == inside.buckets(models[1]).keys()
