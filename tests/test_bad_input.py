"""Bad input: each error says where, what it got, what it needed and what to do; nothing changes.

A row of a table is a fault and the words that its message must have.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import (
    BackwardError,
    HostMemoryError,
    MegacompileError,
    ModelError,
    OptionError,
    host_memory,
    megacompile,
    schedules,
)
from megacompile.errors import OptionTypeError
from tests import inside, zoo
from tests.zoo import WIDTH, Stack, batch, differences, step, twins


def streamed_stack() -> tuple[Any, zoo.Inputs]:
    model, inputs = zoo.stack()
    return megacompile(model, device="cpu"), inputs


def assert_untouched(model: nn.Module, before: nn.Module) -> None:
    """The model is the plain one that it was: nothing moved, nothing replaced."""
    assert not inside.is_streamed(model)
    assert "_apply" not in model.__dict__
    assert differences(before, model) == []


def words(message: str) -> str:
    """A pattern of fragments that must all come, in this order: "where ... got ... fix"."""
    return ".*".join(re.escape(part) for part in message.split(" ... "))


# --- models


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.other = nn.Parameter(torch.empty(2, 2, device="meta"))


def _sparse_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.eye(2).to_sparse())
    return model


def _quantized_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    model.extra = nn.Parameter(quantized, requires_grad=False)
    return model


class Wrapped(Tensor):
    """A tensor subclass, as quantization libraries put them into parameters."""


def _wrapped_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.ones(2).as_subclass(Wrapped), requires_grad=False)
    return model


def _compiled() -> nn.Module:
    model = nn.Linear(2, 2)
    model.compile()
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: lambda x: x, "got function ... torch.nn.Module ... wrap it"),
    "state dict": (lambda: nn.Linear(2, 2).state_dict(), "got OrderedDict ... torch.nn.Module"),
    "class": (lambda: nn.Linear, "got type ... needed a torch.nn.Module"),
    "script": (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript ... needed the Python"),
    "none": (lambda: None, "got NoneType ... needed a torch.nn.Module"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "Sequential has no parameters ... needed"),
    "lazy": (lambda: nn.LazyLinear(2), "LazyLinear.weight is not initialized ... call the model"),
    "meta": (Meta, "tensors of Meta were on meta ... get no values: other; needed a checkpoint"),
    "sparse": (_sparse_parameter, "Linear.extra has layout torch.sparse_coo ... .to_dense()"),
    "quantized": (_quantized_parameter, "Linear.extra is quantized ... dequantize"),
    "subclass": (_wrapped_parameter, "Linear.extra is Wrapped ... ordinary dense tensor"),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        "Sequential.0 has sparse=True ... set sparse=False",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_streamed(name: str) -> None:
    make, message = MODELS[name]
    model = make()
    before = dict(vars(model)) if isinstance(model, nn.Module) else {}
    with pytest.raises(ModelError, match="megacompile\\(\\): .*" + words(message)) as caught:
        megacompile(model)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, MegacompileError)
    if isinstance(model, nn.Module):
        assert vars(model) == before


def test_compiled_before() -> None:
    with pytest.raises(
        OptionError, match=words("compiled with model.compile() ... leave that out")
    ):
        megacompile(_compiled())


def test_schedules_of_a_plain_model() -> None:
    with pytest.raises(ModelError, match=words("Stack is not megacompiled ... megacompile(model)")):
        schedules(Stack())


# --- options

WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "lookahead float": ({"lookahead": 1.0}, "'lookahead' got 1.0 (float); needed an int"),
    "lookahead bool": ({"lookahead": True}, "'lookahead' got True (bool); needed an int"),
    "lookahead none": ({"lookahead": None}, "'lookahead' got None (NoneType); needed an int"),
    "slots text": ({"slots": "4"}, "'slots' got '4' (str); needed an int"),
    "progress int": ({"progress": 1}, "'progress' got 1 (int); needed True, False or None"),
    "lowering bool": ({"lowering": True}, "'lowering' got True (bool); needed one of 'eager'"),
    "device list": ({"device": ["cpu"]}, "'device' got ['cpu'] (list); needed a torch.device"),
    "device bool": ({"device": True}, "'device' got True (bool); needed a torch.device"),
}

OUT_OF_RANGE: dict[str, tuple[dict[str, Any], str]] = {
    "lookahead zero": ({"lookahead": 0}, "got lookahead=0; needed at least 1"),
    "lookahead negative": ({"lookahead": -1}, "got lookahead=-1; needed at least 1"),
    "one slot": ({"slots": 1}, "got slots=1; needed at least 2"),
    "slots below lookahead": (
        {"lookahead": 3, "slots": 3},
        "got slots=3 with lookahead=3 ... at least 4 slots ... raise slots or lower lookahead",
    ),
    "lowering unknown": ({"lowering": "triton"}, "got lowering='triton'; needed one of 'eager'"),
    "device unknown": ({"device": "gpu"}, "got device='gpu'"),
    "device meta": ({"device": "meta"}, "got device='meta'; needed a 'cuda' device or 'cpu'"),
    "device negative": ({"device": -1}, "got device=-1"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_option_of_the_wrong_type(name: str) -> None:
    options, message = WRONG_TYPES[name]
    model, _ = zoo.stack()
    before = copy.deepcopy(model)
    with pytest.raises(OptionTypeError, match=words(message)) as caught:
        megacompile(model, **options)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, OptionError)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_option_out_of_range(name: str) -> None:
    options, message = OUT_OF_RANGE[name]
    model, _ = zoo.stack()
    before = copy.deepcopy(model)
    with pytest.raises(OptionError, match=words(message)) as caught:
        megacompile(model, **options)
    assert isinstance(caught.value, ValueError) and not isinstance(caught.value, TypeError)
    assert_untouched(model, before)


def test_unknown_option() -> None:
    model, _ = zoo.stack()
    with pytest.raises(TypeError, match="look_ahead"):
        megacompile(model, look_ahead=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")], ids=str)
def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=words("no CUDA device ... use device='cpu'")):
        megacompile(Stack(), device=device)


def test_device_index_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match=words("device='cuda:7' ... 2 CUDA devices ... below")):
        megacompile(Stack(), device="cuda:7")


def test_second_call_with_the_same_options() -> None:
    model, inputs = streamed_stack()
    step(model, inputs)
    streamed = inside.streamed(model)
    assert megacompile(model, device="cpu", lowering="eager", lookahead=2) is model
    assert inside.streamed(model) is streamed and schedules(model)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"lookahead": 1}, "lookahead: 2 -> 1"),
        ({"lowering": "inductor"}, "lowering: 'eager' -> 'inductor'"),
        ({"resident": "all"}, "resident: 'auto' -> 'all'"),
        ({"resident": 10}, "resident: 'auto' -> 10"),
        ({"compute_dtype": torch.bfloat16}, "compute_dtype: None -> torch.bfloat16"),
    ],
)
def test_second_call_with_other_options(options: dict[str, Any], change: str) -> None:
    plain, model = twins(zoo.stack()[0])
    with pytest.raises(OptionError, match=words(f"Stack is megacompiled already ... {change}")):
        megacompile(model, **{"device": "cpu", "lowering": "eager", **options})
    step(plain, batch())
    step(model, batch())
    assert differences(plain, model) == []


def test_a_megacompiled_module_inside_of_the_model() -> None:
    inner = megacompile(Stack(), device="cpu")
    with pytest.raises(ModelError, match=words("Sequential.0 is megacompiled ... outermost")):
        megacompile(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), device="cpu")


def test_a_module_inside_of_a_megacompiled_model() -> None:
    model, inputs = streamed_stack()
    with pytest.raises(ModelError, match=words("Block.norm.weight is owned ... Stack.layers.1.")):
        megacompile(model.layers[1], device="cpu")
    model(**inputs)
    model.layers[1] = megacompile(copy.deepcopy(model.layers[1]), device="cpu")
    with pytest.raises(ModelError, match=words("Stack.layers.1 is megacompiled ... outermost")):
        model(**inputs)


# --- memory


def test_host_memory_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 1024)  # 4 MiB, and as much for the gradients
    before = copy.deepcopy(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    free = 258 * 2**20  # 2 MiB above what is left to the rest of the process
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
    with pytest.raises(HostMemoryError) as caught:
        megacompile(model, device="cpu")
    assert isinstance(caught.value, MemoryError)
    lines = str(caught.value).splitlines()
    assert lines[0] == "megacompile(): host memory is too small"
    table = {line[:34].strip(): line[34:].strip() for line in lines[1:-1]}
    assert list(table) == [
        "parameters to move to the host",
        "one bucket, while moving",
        "gradients",
        "needed",
        "available",
    ]
    assert (table["gradients"], table["available"]) == ("4 MiB", "2 MiB")
    assert "requires_grad_(False)" in lines[-1]
    assert_untouched(model, before)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_frozen_parameters_need_no_memory_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).requires_grad_(False)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 264 * 2**20)
    megacompile(model, device="cpu")


# --- backward


def test_backward_twice() -> None:
    model, inputs = streamed_stack()
    loss = model(**inputs)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(
        RuntimeError, match=words("Stack: backward() a second time ... retain_graph")
    ):
        loss.backward()
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.grad is not None and torch.equal(p.grad, g)
    step(model, inputs)  # and goes on


def test_double_backward() -> None:
    model, inputs = streamed_stack()
    x = inputs["x"].requires_grad_()
    loss = model(x, inputs["y"])
    with pytest.raises(BackwardError, match=words("Stack ... create_graph=True ... plain model")):
        torch.autograd.grad(loss, x, create_graph=True)


def test_failed_backward_leaves_the_next_one_right() -> None:
    plain, streamed = twins(zoo.stack()[0])
    loss = streamed(**batch())
    with pytest.raises(BackwardError):
        loss.backward(create_graph=True)
    assert all(p.grad is None for p in streamed.parameters())
    step(plain, batch())
    step(streamed, batch())
    assert differences(plain, streamed) == []


def _edit(model: Any) -> None:
    with torch.no_grad():
        model.layers[1].up.weight.mul_(2)


def _optimizer_step(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters()).step()


def _load(model: Any) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})


def _replace_data(model: Any) -> None:
    """Seen at the next call only: until then the backward has the old memory, as in plain."""
    weight = model.layers[1].up.weight
    weight.data = weight.data * 2
    model(**batch())


def _replace_parameter(model: Any) -> None:
    model.head = nn.Linear(WIDTH, WIDTH)
    model(**batch())


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "in place": (_edit, "Stack: parameter 'layers.1.up.weight' was changed ... backward() before"),
    "optimizer": (_optimizer_step, "Stack: parameter ... was changed ... before optimizer.step()"),
    "load_state_dict": (_load, "Stack: parameter ... was changed"),
    "data": (_replace_data, "Stack: parameter 'layers.1.up.weight' was changed"),
    "parameter": (_replace_parameter, "Stack: parameters were replaced"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameter_changed_between_forward_and_backward(name: str) -> None:
    change, message = CHANGES[name]
    model, inputs = streamed_stack()
    loss = model(**inputs)
    change(model)
    with pytest.raises(BackwardError, match=words(message)):
        loss.backward()
    model.zero_grad()
    step(model, inputs)  # and goes on


def test_data_replaced_between_forward_and_backward_without_a_call() -> None:
    plain, streamed = twins(zoo.stack()[0])
    for model in (plain, streamed):
        loss = model(**batch())
        weight = model.layers[1].up.weight
        weight.data = weight.data * 2
        loss.backward()
    assert differences(plain, streamed) == []


def test_input_changed_between_forward_and_backward() -> None:
    model, inputs = streamed_stack()
    loss = model(**inputs)
    inputs["x"].add_(1)
    with pytest.raises(
        BackwardError, match=words("Stack: input ... (4, 16) was changed ... clone")
    ):
        loss.backward()


# --- hooks and moves


def test_compiled_autograd() -> None:
    model = megacompile(Stack(), device="cpu")
    loss = model(**batch())
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(BackwardError, match=words("Stack: backward() in compiled autograd ... off")),
    ):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    model(**batch()).backward()


def test_to_device_leaves_parameters_and_says_so_once() -> None:
    model, inputs = zoo.batchnorm()
    plain, streamed = twins(model)
    with pytest.warns(UserWarning, match=words("parameters stay in host memory ... said once")):
        assert streamed.to("meta") is streamed
    assert all(p.device.type == "cpu" for p in streamed.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed.to("meta")


def test_to_the_device_it_is_on_says_nothing() -> None:
    plain, streamed = twins(zoo.batchnorm()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert streamed.to("cpu") is streamed
        assert streamed.cpu().float() is streamed
    step(plain, batch())
    step(streamed, batch())
    assert differences(plain, streamed) == []


@pytest.mark.gpu
@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(0)])
def test_to_cuda_moves_nothing(move: Callable[[nn.Module], nn.Module]) -> None:
    streamed = megacompile(zoo.batchnorm()[0], device="cuda", lowering="eager")
    with pytest.warns(UserWarning, match="parameters stay in host memory"):
        move(streamed)
    assert all(p.device.type == "cpu" for p in streamed.parameters())
    assert all(b.device.type == "cuda" for b in streamed.buffers())
    step(streamed, batch())


# --- code that cannot be scheduled


def test_unschedulable_code_says_so_once_and_runs() -> None:
    class Unique(nn.Module):
        """An operator whose result's shape depends on data."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden: Tensor = self.layer(x)
            return hidden[hidden > 0].square().mean() + y.mean()

    plain, streamed = twins(Unique())
    step(plain, batch())
    with pytest.warns(UserWarning) if _captures_dynamic_shapes() else warnings.catch_warnings():
        step(streamed, batch())
    assert differences(plain, streamed) == []


def _captures_dynamic_shapes() -> bool:
    return bool(torch._dynamo.config.capture_dynamic_output_shape_ops)
