"""Calls of a streamed model: inputs, outputs, modes, and forwards and backwards in any order.

Each test does the same to a megacompiled model and to a plain copy of it, in the same process, and
compares every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from tests import zoo
from tests.zoo import (
    WIDTH,
    Stack,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)

# --- inputs and outputs


class Output(NamedTuple):
    prediction: Tensor
    hidden: Tensor


@dataclass
class Record:
    prediction: Tensor
    hidden: Tensor


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda p, h: (p, h),
    "list": lambda p, h: [p, h],
    "dict": lambda p, h: {"prediction": p, "hidden": h},
    "namedtuple": Output,
    "dataclass": Record,
    "nested": lambda p, h: {"a": (p, [h, None, 3, "text"]), "b": {"c": p}},
    "same twice": lambda p, h: (h, h, p),
}


class Several(nn.Module):
    """Gives its prediction and its middle in a form of choice."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.stack = Stack()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.stack.layers[0](self.stack.embed(x))
        return self.form(self.stack.head(self.stack.layers[1](hidden)), hidden)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Record):
        return [value.prediction, value.hidden]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("form", OUTPUTS)
def test_outputs(form: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Several(OUTPUTS[form]))
    for chosen in (slice(None), slice(0, 1), slice(1, 2)):  # which outputs get a gradient
        results = [model(batch()["x"]) for model in (plain, streamed)]
        assert type(results[0]) is type(results[1])
        for mine, theirs in zip(*map(tensors, results), strict=True):
            assert equal(mine, theirs)
        for result in results:
            torch.stack([t.square().sum() for t in tensors(result)[chosen]]).sum().backward()
        assert_same(plain, streamed)


def test_hf_output_by_attribute_key_and_position() -> None:
    model, inputs = zoo.hf_qwen2(), zoo.tokens()
    plain, streamed = twins(model)
    with torch.no_grad():
        mine, theirs = plain(**inputs), streamed(**inputs)
    assert type(theirs) is type(mine)
    assert list(theirs) == list(mine) == ["loss", "logits"]
    assert equal(theirs.logits, mine.logits) and equal(theirs["loss"], mine[0])


def test_keyword_positional_and_missing_inputs() -> None:
    plain, streamed, inputs = stacks()
    x, y = inputs["x"], inputs["y"]
    for call in (
        lambda m: m(x, y),
        lambda m: m(x, y=y),
        lambda m: m(y=y, x=x),
        lambda m: F.mse_loss(m(x), y),  # the loss outside of the model
    ):
        assert equal(call(plain).detach(), call(streamed).detach())
        call(plain).backward()
        call(streamed).backward()
        assert_same(plain, streamed)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "not a leaf"])
def test_inputs_that_require_grad(leaf: bool) -> None:
    plain, streamed, inputs = stacks()
    grads = []
    for model in (plain, streamed):
        x = inputs["x"].clone().requires_grad_()
        for _ in range(2):
            model(x if leaf else x.tanh(), inputs["y"]).backward()
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)


def test_input_that_is_also_an_output() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.layer(x), x[1:]

    plain, streamed = twins(Through())
    grads = []
    for model in (plain, streamed):
        x = batch()["x"].requires_grad_()
        same, out, part = model(x)
        assert equal(same, x) and equal(part, x[1:])
        (out.square().sum() + part.square().sum()).backward()
        model(x)[0].sum().backward()
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)


def test_nested_inputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, data: dict[str, Any], *, scale: float, add: Tensor | None) -> Tensor:
            first, rest = data["pair"]
            out: Tensor = self.layer(first) * scale + rest["y"]
            return (out if add is None else out + add).square().mean()

    plain, streamed = twins(Nested())
    data = {"pair": (batch()["x"], {"y": batch()["y"]})}
    for scale, add in ((2.0, None), (0.5, None), (0.5, torch.ones(WIDTH))):
        for model in (plain, streamed):
            model(data, scale=scale, add=add).backward()
        assert_same(plain, streamed)


@pytest.mark.gpu
def test_inputs_on_the_host_are_moved() -> None:
    model, inputs = zoo.stack()
    plain = copy.deepcopy(model).cuda()
    streamed = megacompile(model, device="cuda", lowering="eager")
    loss = streamed(inputs["x"], y=inputs["y"])
    assert loss.device == torch.device("cuda", torch.cuda.current_device())
    loss.backward()
    step(plain, {key: value.cuda() for key, value in inputs.items()})
    assert_same(plain.cpu(), streamed)


# --- calls


def test_two_forwards_before_one_backward() -> None:
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        (model(**batch(1)) + 2 * model(**batch(2))).backward()
    assert_same(plain, streamed)


def test_forwards_of_several_and_backwards_in_another_order() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for model in (plain, streamed):
        torch.manual_seed(0)
        losses = [model(**batch(i)) for i in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
    assert_same(plain, streamed)


def test_two_losses_one_after_the_other() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Several(OUTPUTS["tuple"]))
    for _ in range(2):
        for model in (plain, streamed):
            prediction, hidden = model(batch()["x"])
            prediction.square().mean().backward(retain_graph=True)
            hidden.square().mean().backward()
        assert_same(plain, streamed)


def test_backward_twice_with_retain_graph() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for model in (plain, streamed):
        torch.manual_seed(0)
        loss = model(**batch())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(plain, streamed)


def test_a_forward_whose_backward_never_comes() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model(**inputs)
    assert_steps_same(plain, streamed, inputs)


def test_detached_between_two_calls() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        hidden = model(inputs["x"]).detach()
        model(hidden, inputs["y"]).backward()
    assert_same(plain, streamed)


def test_called_on_its_own_output() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model(model(inputs["x"]), inputs["y"]).backward()
    assert_same(plain, streamed)


def test_two_models_in_one_loss() -> None:
    """A GAN's generator and discriminator, or a student and its teacher."""
    first, second = twins(zoo.stack()[0]), twins(zoo.dropout()[0])
    for one, other in zip(first, second, strict=True):
        torch.manual_seed(0)
        other(one(batch()["x"]), batch()["y"]).backward()
    assert_same(*first)
    assert_same(*second)


def test_module_of_a_larger_plain_model() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(whole)
    megacompile(whole[1], device="cpu", lowering="eager")
    for model in (plain, whole):
        model(batch()["x"]).square().mean().backward()
    assert_same(plain, whole)


def test_a_layer_called_by_itself() -> None:
    """Outside of a call of the model, its modules are plain modules on host parameters."""
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        model.layers[1](inputs["x"]).sum().backward()
    assert_same(plain, streamed)


@pytest.mark.parametrize("name", ["batchnorm", "dropout"])
def test_train_and_eval_switches(name: str) -> None:
    plain, streamed = twins(zoo.ZOO[name]()[0])
    for mode in (True, False, True, False):
        plain.train(mode)
        streamed.train(mode)
        assert_steps_same(plain, streamed, batch())
        with torch.no_grad():
            torch.manual_seed(1)
            mine = plain(batch(5)["x"])
            torch.manual_seed(1)
            assert equal(mine, streamed(batch(5)["x"]))
        assert_same(plain, streamed)  # a forward in training mode moves the statistics


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_has_a_forward_only_schedule(mode: Callable[[], Any]) -> None:
    plain, streamed, inputs = stacks()
    with mode():
        assert equal(plain(**inputs), streamed(**inputs))
    (schedule,) = schedules(streamed)
    assert schedule.backward is None
    assert_steps_same(plain, streamed, inputs)  # and it trains after
    assert any(s.backward is not None for s in schedules(streamed))


def test_generate() -> None:
    model, inputs = zoo.hf_gpt2(), zoo.tokens()
    plain, streamed = twins(model.eval())
    prompt = {"input_ids": inputs["input_ids"][:1, :4]}
    wanted = dict(do_sample=False, max_new_tokens=3, pad_token_id=0)
    mine, theirs = (m.generate(**prompt, **wanted) for m in (plain, streamed))
    assert torch.equal(mine, theirs)


# --- autocast


def test_autocast_outside() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**inputs)
            loss.backward()
    assert_same(plain, streamed)


def test_autocast_inside() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                prediction = self.stack(x)
                with torch.autocast("cpu", enabled=False):
                    prediction = prediction.float() @ self.stack.head.weight
            return F.mse_loss(prediction, y)

    plain, streamed = twins(Inside())
    assert_steps_same(plain, streamed, batch())


def test_autocast_on_and_off() -> None:
    plain, streamed, inputs = stacks()
    for on in (False, True, False):
        for model in (plain, streamed):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                loss = model(**inputs)
            loss.backward()
        assert_same(plain, streamed)


def test_bfloat16_model() -> None:
    model, inputs = zoo.stack()
    plain, streamed = twins(model.bfloat16())
    assert_steps_same(plain, streamed, {k: v.bfloat16() for k, v in inputs.items()})
