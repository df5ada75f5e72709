"""Calls of a streamed model: forms, autocast, other weights, and `torch.compile` around it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megacompile import compat, megacompile, schedules
from tests import inside, zoo
from tests.equality.nets import Applies, in_a_row
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, stacks, step, twins

# --- inputs and outputs


class Output(NamedTuple):
    prediction: Tensor
    hidden: Any


@dataclass
class Record:
    prediction: Tensor
    hidden: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same twice": lambda p, h: (h, h, p),
    "nested": lambda p, h: {"a": Output(p, [h, None, 3, "text"]), "b": {"c": p}},
    "dataclass": Record,
}


def several(form: Callable[[Tensor, Tensor], Any]) -> Any:
    """A stack that gives its prediction and its middle in a form of choice."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.stack.layers[0](m.stack.embed(x))
        return form(m.stack.head(m.stack.layers[1](hidden)), hidden)

    torch.manual_seed(0)
    return Applies(forward, stack=Stack())


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an output, in order."""
    if isinstance(value, Record):
        return [value.prediction, value.hidden]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_outputs(form: str) -> None:
    plain, streamed = twins(several(FORMS[form]))
    for chosen in (slice(None), slice(0, 1), slice(1, 2)):  # which outputs get a gradient
        results = [model(batch()["x"]) for model in (plain, streamed)]
        assert type(results[0]) is type(results[1])
        for mine, theirs in zip(*map(tensors, results), strict=True):
            assert equal(mine, theirs)
        for result in results:
            torch.stack([t.square().sum() for t in tensors(result)[chosen]]).sum().backward()
        assert_same(plain, streamed)
    for model in (plain, streamed):  # two losses, one after the other
        first, second, *_ = tensors(model(batch()["x"]))
        first.square().mean().backward(retain_graph=True)
        second.square().mean().backward()
    assert_same(plain, streamed)


def test_outputs_of_transformers_and_what_they_generate() -> None:
    plain, streamed = twins(zoo.hf_gpt2().eval())
    inputs = zoo.tokens()
    with torch.no_grad():
        mine, theirs = plain(**inputs), streamed(**inputs)
    assert type(theirs) is type(mine) and list(theirs) == list(mine)
    assert equal(theirs.logits, mine.logits) and equal(theirs["loss"], mine[0])
    prompt = {"input_ids": inputs["input_ids"][:1, :4]}
    wanted: Any = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    assert torch.equal(*(m.generate(**prompt, **wanted) for m in (plain, streamed)))


def through(m: Any, data: dict[str, Any], *, scale: float, add: Tensor | None) -> Any:
    """Takes containers, numbers and what may be missing; gives its input back."""
    first, rest = data["pair"]
    out: Tensor = m.first(first) * scale + rest["y"]
    return first, out if add is None else out + add, first[1:]


def test_nested_inputs_and_inputs_that_are_outputs() -> None:
    plain, streamed = twins(in_a_row(through, count=1, width=WIDTH))
    for scale, add in ((2.0, None), (0.5, None), (0.5, torch.ones(WIDTH))):
        grads = []
        for model in (plain, streamed):
            x = batch()["x"].requires_grad_()
            same, out, part = model({"pair": (x, {"y": batch()["y"]})}, scale=scale, add=add)
            assert equal(same, x) and equal(part, x[1:])
            (out.square().sum() + part.square().sum()).backward()
            model({"pair": (x, {"y": batch()["y"]})}, scale=scale, add=add)[0].sum().backward()
            grads.append(x.grad)
        assert equal(*grads)
        assert_same(plain, streamed)


X, Y = batch(1).values()


def test_hooks_on_saved_tensors_see_nothing_of_a_capture() -> None:
    """A checkpoint compares what is saved in both of its forwards; the first one is captured."""
    model, inputs = zoo.graph_break()
    models = twins(model)
    for each in models:
        checkpoint(each, inputs["x"], inputs["y"], use_reentrant=False).backward()
    assert_same(*models)


def within(device: str = "cpu", dropout: float = 0.1) -> Any:
    """Enters and leaves autocast; a part of it computes in float32 all the same."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            prediction = m.stack(x)
            with torch.autocast(device, enabled=False):
                prediction = prediction.float() @ m.stack.head.weight
        q, k, v = m.values(x).view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)  # float32, on a CPU
        return F.mse_loss(prediction, y) + heads.float().square().mean()

    torch.manual_seed(0)
    return Applies(forward, stack=Stack(), values=nn.Linear(WIDTH, 3 * WIDTH))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_autocast_inside(activations: str) -> None:
    """What was traced there has its casts already."""
    models = twins(within(), activations=activations)
    for enabled in (False, True):
        for each in models:
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = each(**batch())
            loss.backward()
        assert_same(*models)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lowering", "dropout", "tolerance"), [("eager", 0.1, 0.0), ("inductor", 0.0, 2e-2)]
)
def test_autocast_on_a_gpu(lowering: str, dropout: float, tolerance: float) -> None:
    """Inductor draws other numbers for a dropout."""
    model, inputs = within("cuda", dropout), {key: value.cuda() for key, value in batch().items()}
    plain = copy.deepcopy(model).cuda()
    megacompile(model, lowering=lowering)
    for each in (plain, model):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = each(**inputs)
        loss.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert float((b.grad.cuda() - a.grad).norm()) <= tolerance * float(a.grad.norm())


def test_models_beside_and_around_one_another() -> None:
    """A GAN's generator and discriminator, or a student and its teacher; a part of a plain one."""
    first, second = twins(zoo.stack()[0]), twins(zoo.dropout()[0])
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(whole)
    megacompile(whole[1], device="cpu", lowering="eager")
    for one, other, last in zip(first, second, (plain, whole), strict=True):
        torch.manual_seed(0)
        (other(one(X), Y) + last(X).square().mean()).backward()
    for pair in (first, second, (plain, whole)):
        assert_same(*pair)


# --- functional calls: other tensors are a model's weights in a call

Weights = dict[str, Tensor]


def named(model: nn.Module) -> Weights:
    return dict(model.named_parameters())


def called(model: nn.Module, weights: Weights, seed: int = 1) -> Tensor:
    loss: Tensor = functional_call(model, weights, kwargs=batch(seed))
    return loss


def inner_step(model: nn.Module) -> Tensor:
    """First-order MAML: the loss behind two inner steps of SGD, the second of some weights."""
    weights = named(model)
    for i, names in enumerate((list(weights), [n for n in weights if "head" in n])):
        gradients = torch.autograd.grad(called(model, weights, i), [weights[n] for n in names])
        weights |= {n: weights[n] - 0.1 * g for n, g in zip(names, gradients, strict=True)}
    return called(model, weights, 3)


def given_parameters(model: nn.Module) -> Tensor:
    """As an average of the weights is: no replacement, so they go into no bucket."""
    given: Weights = {n: nn.Parameter(p.detach() * 0.9) for n, p in named(model).items()}
    places = [p.data_ptr() for p in given.values()]
    called(model, given).backward()
    assert [p.data_ptr() for p in given.values()] == places
    return torch.stack([p.grad.sum() for p in given.values() if p.grad is not None]).sum()


def in_a_module_around(model: nn.Module) -> Tensor:
    scale = nn.Parameter(torch.tensor(3.0))
    made = Applies(lambda m, **inputs: m.inner(**inputs) * m.scale, inner=model, scale=scale)
    return called(made, {n: p * 2 for n, p in made.named_parameters()})


def of_samples(model: nn.Module) -> Tensor:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    each = vmap(grad(lambda w, x, y: functional_call(model, w, (x, y))), (None, 0, 0))
    found: Tensor = each(weights, X, Y)["layers.0.up.weight"]
    return found


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "MAML": inner_step,
    "exchanged": lambda m: called(
        m, {"head.weight": m.embed.weight, "embed.weight": m.head.weight}
    ),
    "of a streamed one": lambda m: called(m, {"head.weight": m.embed.weight * 2 + m.head.weight}),
    "parameters": given_parameters,
    "a module around": in_a_module_around,
    "gradients of samples": of_samples,
}


def places(model: Any) -> tuple[Any, ...]:
    """What a functional call leaves as it is: parameters, where they lie, their proxies."""
    streamed = inside.streamed(model)
    found = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    return found, list(map(id, streamed.machine.buckets.values())), id(streamed.buckets.proxies)


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")  # of torch.func's transforms
def test_functional_calls_of_one_model() -> None:
    """Gradients reach what the weights depend on. It trains, and the next call sees the update."""
    models = plain, model = twins(zoo.stack()[0])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
    for name, loss in LOSSES.items():
        before = places(model)
        values = []
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            value = loss(each)
            if value.requires_grad:
                value.sum().backward()
            values.append(value.detach())
        assert equal(*values), name
        assert not zoo.differences(plain, model), name
        assert places(model) == before, name
        for optimizer in optimizers:
            optimizer.step()
    for each in models:
        each.zero_grad()
        torch.manual_seed(3)
        each.layers.append(zoo.Block())  # taken over in the call, with the tensors given out of it
        each.embed.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        called(each, {n: p * 2 for n, p in each.named_parameters() if "layers" in n}).backward()
    assert_same(plain, model)


@pytest.mark.parametrize("kind", ["tied", "batchnorm"])
def test_functional_calls_with_ties_and_buffers(kind: str) -> None:
    """One tensor is given for both places; statistics go into the dict that was given."""
    models = twins(zoo.ZOO[kind]()[0])
    states = []
    for each in models:
        step(each, batch())
        state = {n: b.clone() for n, b in each.named_buffers()}
        state |= {n: p * 2 for n, p in each.named_parameters()}
        called(each, state, 2).backward()
        states.append(list(state.values()))
        assert kind == "batchnorm" or each.head.weight is each.embed.weight
    assert all(map(equal, *states))
    assert_same(*models)


# --- torch.compile around it: it leaves the model as it is, which is said once


def norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def by_layer(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


# What is called for a loss, plain and of the streamed model; and how often something is said.
Made = Callable[[Any], Callable[..., Tensor]]
AROUND: dict[str, tuple[Made, Made, int]] = {
    "model": (lambda m: m, compiled, 1),
    "penalty": (  # it reads parameters behind a step, whose update may be on its way
        lambda m: lambda **inputs: m(**inputs) + norm(m).detach(),
        lambda m: lambda **inputs: m(**inputs) + compiled(norm)(m).detach(),
        0,
    ),
    "layers": (by_layer, by_layer, 0),
    "train step": (lambda m: m, lambda m: m, 1),
}


@pytest.mark.parametrize("name", AROUND)
def test_torch_compile_changes_nothing(name: str) -> None:
    models = plain, streamed = twins(zoo.stack()[0])
    *makes, count = AROUND[name]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]

    def train(call: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        loss = call(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    steps: list[Callable[..., Tensor]] = [train, compiled(train) if name == "train step" else train]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls = [make(model) for make, model in zip(makes, models, strict=True)]
        for _ in range(2):
            assert equal(
                *(step(*each) for step, *each in zip(steps, calls, optimizers, strict=True))
            )
            assert_same(plain, streamed)
    assert len([w for w in caught if str(w.message).startswith("megacompile")]) == count
    assert schedules(streamed), "and it is still streamed"


@pytest.mark.filterwarnings("ignore:megacompile")
def test_what_is_compiled_can_be_asked_and_copied() -> None:
    plain, streamed, inputs = stacks()
    made: Any = torch.compile(streamed, backend="eager")
    made(**inputs)
    assert schedules(made) == schedules(streamed) != []
    for other in (copy.deepcopy(streamed), pickle.loads(pickle.dumps(streamed))):
        other.compile(backend="eager")
        assert equal(plain(**inputs).detach(), other(**inputs).detach())
        assert inside.is_streamed(other)
    assert compat.compiled_call(plain) is None
