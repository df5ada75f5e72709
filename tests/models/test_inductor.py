"""Models whose stages Inductor compiles: as the plain model but for rounding, compiled once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile import explain, megacompile, schedules
from megacompile.ir import ops
from tests import inside
from tests.equality.nets import Applies, from_config, in_a_row
from tests.zoo import assert_same, equal, twins

pytestmark = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="no C++ compiler here")
cudnn_batch_norm: Any = torch.cudnn_batch_norm
X = torch.linspace(-1, 1, 18).view(3, 6)
OPTIONS: Any = {"lowering": "inductor", "progress": False}


def compiled(model: nn.Module) -> int:
    """How many graphs Inductor has compiled for it so far, or found in its caches."""
    code = explain(model, changes=False).code["stages"]
    return code.found + code.made


def assert_gradients_close(plain: nn.Module, streamed: nn.Module, places: float = 1e-5) -> None:
    for mine, theirs in zip(plain.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=places, atol=places)


def annealed(m: Any, x: Tensor, temperature: float, weight: float, step: int) -> Tensor:
    """A size that is an expression, a temperature, a weight of a loss, and a counted scale."""
    h = (m.layer(x) * temperature).tanh() + x * (1 / (step + 4))
    h = torch.where(h > temperature - 1, h, -weight) * (1 - weight) + x * weight
    h = h.view(x.shape[0] * 2, 4).relu().view(x.shape)
    penalty = (h.square() + 0.1).mean() * weight
    labels = torch.arange(x.shape[0]) % 4
    return F.cross_entropy(h.float() / temperature, labels) + penalty


def test_sizes_and_floats_are_compiled_once() -> None:
    """At most three times: as they were first, with symbols for what has changed, and for all."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    plain, streamed = twins(Applies(annealed, layer=layer), **OPTIONS)
    counts = []
    for k, rows in enumerate((4, 4, 6, 9, 33, 5)):
        x = torch.linspace(-1, 1, rows * 8).view(rows, 8).bfloat16()
        losses = [each(x, 1.0 - k / 20, 0.01 * (k + 1), k) for each in (plain, streamed)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
        counts.append(compiled(streamed))
    assert_gradients_close(plain, streamed, 4e-2)
    assert counts[3:] == [counts[3]] * 3 and len(schedules(streamed)) <= 3
    symbols = schedules(streamed)[-1].symbols
    assert symbols is not None and len(symbols.planned) == 4


def test_results_have_the_strides_that_they_were_traced_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor pads matrix products, and gives a part of what it has padded, in each call."""

    def padded(value: Any) -> Any:
        is_matrix = isinstance(value, Tensor) and value.dim() == 2
        return F.pad(value, (0, 4))[:, :-4] if is_matrix else value

    def compiled(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        metas = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]

        def run(*given: Any) -> list[Any]:
            given = tuple(given[0]) if isinstance(given[0], list) else given
            for value, meta in zip(given, metas, strict=True):
                assert not isinstance(value, Tensor) or value.stride() == meta.stride()
            return list(map(padded, module(*given)))

        return run

    monkeypatch.setattr(torch._inductor, "compile", compiled)
    plain, streamed = twins(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5)), **OPTIONS)
    for _ in range(3):
        made, wanted = streamed(X), plain(X)
        assert made.stride() == wanted.stride() and torch.equal(made, wanted)
        for each in (made, wanted):
            each.sum().backward()
        assert_same(plain, streamed)


NUMBERS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, k: x * (-0.5) ** torch.arange(4),
    lambda x, k: x * (-2) ** (x > 0).long(),
    lambda x, k: x * (-1) ** x.shape[0],
    lambda x, k: x * ((-1) ** (k + 1) + (-3) ** (k // 2)),
    lambda x, k: x + k.bit_length() + k.__add__(1),
    lambda x, k: x[:, : (k - 3) ** 2 % 4 + 1],
]


def test_numbers_are_those_of_python() -> None:
    """Powers of negative numbers as FX writes them, and their methods."""

    def forward(m: Any, x: Tensor, k: int) -> list[Tensor]:
        y = m.first(x)
        return [case(y, k) for case in NUMBERS]

    plain, streamed = twins(in_a_row(forward, count=1))
    for k in range(2, 7):
        x = torch.linspace(-1, 1, 4 * k).view(k, 4)
        found = [model(x, k) for model in (plain, streamed)]
        for values in found:
            torch.stack([value.square().sum() for value in values]).sum().backward()
        for i, (mine, theirs) in enumerate(zip(*found, strict=True)):
            assert torch.equal(mine, theirs), (i, k)
    assert_same(plain, streamed)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("device", "checkpoints", "options"),
    [
        ("cpu", False, {"activations": "keep"}),
        pytest.param("cpu", True, {}, marks=pytest.mark.thorough),
        pytest.param("cpu", False, {"tiles": 4}, marks=pytest.mark.thorough),
        pytest.param("cuda", False, {}, marks=pytest.mark.gpu),
        pytest.param("cuda", True, {}, marks=pytest.mark.gpu),
    ],
)
def test_a_language_model_learns_the_same(
    device: str, checkpoints: bool, options: dict[str, Any]
) -> None:
    """Hugging Face's, whose attention gets no mask: its plain loop passes is_causal itself."""

    def made() -> Any:
        torch.manual_seed(0)
        model: Any = from_config("qwen2", **SIZES, **HEADS, _attn_implementation="sdpa")
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.to(device)

    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    plain = made()
    streamed = megacompile(made(), **OPTIONS, **options)
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, streamed)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (name, a), b in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad.cpu(), a.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    reasons = [line for schedule in schedules(streamed) for line in schedule.plan.reasons]
    assert any(line.startswith("2 attentions are causal") for line in reasons)


class Odd(nn.Module):
    """A norm by cuDNN's operator, as torch calls it on a GPU; a part in float32 within autocast; an
    output that is expanded, as of a policy that has one deviation for all."""

    def __init__(self, *, by_cudnn: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.by_cudnn = by_cudnn

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        if self.by_cudnn and self.training:
            norm, statistics = self.norm, (self.norm.running_mean, self.norm.running_var)
            x = cudnn_batch_norm(x, norm.weight, norm.bias, *statistics, True, 0.1, 1e-5)[0]
        else:
            x = self.norm(x)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            with torch.autocast("cpu", enabled=False):
                y = self.second(hidden.float())
        return y, y.sum(0).expand_as(y)


def test_odd_operators() -> None:
    torch.manual_seed(0)
    plain, model = Odd(by_cudnn=False), Odd(by_cudnn=True)
    model.load_state_dict(plain.state_dict())
    megacompile(model, device="cpu", activations="recompute", **OPTIONS)
    for k in range(3):
        x = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(k))
        outputs = []
        for each in (plain, model):
            each.train(k < 2)
            outputs.append(each(x))
            torch.stack([y.square().mean() for y in outputs[-1]]).sum().backward()
        for mine, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=2e-2, atol=2e-2)
    assert_gradients_close(plain, model, 3e-2)
    for name in ("norm.running_mean", "norm.running_var"):
        statistic = plain.get_buffer(name)
        torch.testing.assert_close(model.get_buffer(name), statistic, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, 4, 6, 5))
    assert type(caught.value) is RuntimeError


def halves(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What two stages compute; a norm aside, whose output nobody reads."""
    half = m.layers[0](x)
    m.aside(half)
    return half, m.layers[1](half)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activations", ["auto", "recompute"])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_no_backward_takes_statistics(lowering: str, activations: str, device: str) -> None:
    """So no copy of them is made, and a backward for other outputs than was guessed is right."""
    torch.manual_seed(0)
    parts = [[nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()] for _ in range(2)]
    layers = nn.ModuleList(nn.Sequential(*each) for each in parts)
    plain = Applies(halves, layers=layers, aside=nn.BatchNorm2d(4)).to(device)
    options: dict[str, Any] = {"lowering": lowering, "activations": activations}
    options |= {"device": device, "resident": 0}
    streamed = megacompile(copy.deepcopy(plain), progress=False, **options)
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for which in (1, 1, 0, 1):
            x = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(which)).to(device)
            with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
                model(x)[which].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(
        plain.state_dict().items(), streamed.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=1e-5, rtol=1e-4, msg=name)
        assert lowering == "inductor" or equal(a, b), name
    copied = [ops.nodes_of(s.forward, ops.snapshot) for s in schedules(streamed)]
    changed = [ops.nodes_of(s.forward, ops.assign) for s in schedules(streamed)]
    assert len(changed[0]) == 9  # three of each norm
    # torch's operator in one piece takes running means and variances, whether it needs them or not
    assert (len(copied[0]) == 0) == (lowering == "inductor") or activations == "recompute"


def plainly(model: Any, x: Tensor) -> Tensor:
    return model.norm(model.first(x)).relu()


uncaptured = torch.compiler.disable(plainly)


@pytest.mark.filterwarnings("ignore:megacompile")  # one is not captured
def test_captured_and_eager_forwards_before_one_backward() -> None:
    """The eager one has saved the statistics, and the captured one counts no version of them."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    plain, streamed = twins(
        in_a_row(lambda m, x, eager: (uncaptured if eager else plainly)(m, x), count=1, norm=norm)
    )
    x = torch.randn(3, 4)
    for model, first in itertools.product((plain, streamed), (True, False)):
        outputs = [model(x, eager) for eager in (first, not first)]
        (outputs[0].square() + outputs[1]).mean().backward()
    assert_same(plain, streamed)
    statistics = (plain.norm.running_mean, streamed.norm.running_mean)
    assert len({value._version for value in statistics if value is not None}) == 1
