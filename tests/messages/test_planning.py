"""Every message about models, options, memory and what comes between a forward and its backward.

A row: how to provoke it, the class of the error, its text. What varies in a text is `{}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from megacompile import (
    BackwardError,
    HostMemoryError,
    ModelError,
    OptionError,
    explain,
    full_parameters,
    megacompile,
    trace,
)
from tests import quantized
from tests.messages.said import assert_says
from tests.zoo import WIDTH, batch, stack


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, device="meta")
        self.table = torch.arange(4, device="meta")


class Wrapped(Tensor):
    """A tensor subclass, as quantization libraries put them into parameters."""


def with_parameter(tensor: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(tensor, requires_grad=False)
    return model


MODEL = nn.Linear(2, 2)
QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def compiled() -> nn.Module:
    model = nn.Linear(2, 2)
    model.compile()
    return model


def on_cpu(model: nn.Module | None = None, **options: Any) -> Any:
    given = {"device": "cpu", "lowering": "eager", **options}
    return megacompile(stack()[0] if model is None else model, **given)


def packed(trained: bool) -> Any:
    model = quantized.model(quantized.wrapped)
    if trained:
        model.get_parameter("layers.0.first.base.weight").requires_grad_()
    return model


def trained_later() -> None:
    model = on_cpu(packed(False))
    model.get_parameter("layers.0.first.base.weight").requires_grad_()
    model(torch.arange(16).view(2, 8))


def again(**options: Any) -> None:
    model = on_cpu()
    on_cpu(model, **options)


def inside(whole: bool) -> None:
    model = on_cpu()
    model(**batch())
    if whole:
        on_cpu(nn.Sequential(model, nn.Linear(WIDTH, WIDTH)))
    on_cpu(model.layers[1])


def changed(change: Callable[[Any], None]) -> None:
    """Between a forward and its backward."""
    model, inputs = on_cpu(), batch()
    loss = model(**inputs)
    change((model, inputs))
    loss.backward()


def edit(given: Any) -> None:
    with torch.no_grad():
        given[0].layers[1].up.weight.mul_(2)


def replace_parameter(given: Any) -> None:
    given[0].head = nn.Linear(WIDTH, WIDTH)
    given[0](**batch())


def twice() -> None:
    loss = on_cpu()(**batch())
    loss.backward()
    loss.backward()


def compiled_autograd() -> None:
    loss = on_cpu()(**batch())
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def double_backward() -> None:
    inputs = batch()
    x = inputs["x"].requires_grad_()
    torch.autograd.grad(on_cpu()(x, inputs["y"]), x, create_graph=True)


ORDINARY = (
    "needed an ordinary dense tensor, or a quantized one of torchao or bitsandbytes; call "
    "megacompile() before quantizing, or dequantize it; for a DTensor, use param.full_tensor() "
    "and mesh="
)
ROWS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a function": (lambda: megacompile(cast(Any, lambda x: x)), ModelError,
     "megacompile(): got function; needed a torch.nn.Module (for a function, wrap it in a module "
     "that owns the parameters)"),
    "an optimizer by position": (
     lambda: cast(Any, megacompile)(MODEL, torch.optim.SGD(MODEL.parameters())), OptionError,
     "megacompile(): got SGD by position; needed options by name, such as device='cpu' or "
     "optimizer= (AdamW, Adam, SGD or Lion, to update in the backward; without it "
     "optimizer.step() works with every optimizer)"),
    "TorchScript": (lambda: megacompile(torch.jit.script(nn.Linear(2, 2))), ModelError,
     "megacompile(): RecursiveScriptModule is a TorchScript module, which cannot be captured; "
     "needed the Python module that it was made from"),
    "no parameters": (lambda: megacompile(nn.Sequential(nn.ReLU())), ModelError,
     "megacompile(): Sequential has no parameters; needed at least one to stream; call a lazy "
     "module once first"),
    "a lazy module": (lambda: megacompile(nn.LazyLinear(2)), ModelError,
     "megacompile(): parameter LazyLinear.weight is not initialized yet; call the model once "
     "first"),
    "a tensor on meta": (
     lambda: on_cpu(with_parameter(torch.empty(2, device="meta"))), ModelError,
     "megacompile(): 1 tensors of Linear were on meta and get no values: extra; needed a "
     "checkpoint that has them (checkpoint=), or code that initializes them; give its module a "
     "reset_parameters() that writes all of it; or build it in memory (with torch.device('cpu'):) "
     "before megacompile()"),
    "a tensor that is neither": (lambda: on_cpu(Stray()), ModelError,
     "megacompile(): Stray.table is a tensor on meta, and neither a parameter nor a buffer, so "
     "it cannot be initialized; needed one in memory: create it with device='cpu'"),
    "a sparse parameter": (lambda: on_cpu(with_parameter(torch.eye(2).to_sparse())), ModelError,
     "megacompile(): parameter Linear.extra has layout torch.sparse_coo; needed a dense one; use "
     ".to_dense()"),
    "a quantized parameter": (lambda: on_cpu(with_parameter(QUANTIZED)), ModelError,
     f"megacompile(): parameter Linear.extra is quantized; {ORDINARY}"),
    "a subclass": (lambda: on_cpu(with_parameter(torch.ones(2).as_subclass(Wrapped))), ModelError,
     f"megacompile(): parameter Linear.extra is Wrapped; {ORDINARY}"),
    "sparse gradients": (lambda: on_cpu(nn.Sequential(nn.Embedding(4, 2, sparse=True))), ModelError,
     "megacompile(): Sequential.0 has sparse=True, whose gradients are sparse tensors; needed "
     "dense ones; set sparse=False"),
    "a trained packed weight": (lambda: on_cpu(packed(True)), ModelError,
     "megacompile(): parameter Model.layers.0.first.base.weight is a Int8 that requires grad; "
     "needed a frozen one, because quantized data have no gradients; use requires_grad_(False) "
     "and train adapters (LoRA)"),
    "one that is trained later": (trained_later, ModelError,
     "a parameter of shape (256, 128) is a Int8 that requires grad since megacompile(); needed "
     "a frozen one, because quantized data have no gradients; use requires_grad_(False) and "
     "train adapters (LoRA)"),
    "a packed weight in full": (lambda: full_parameters(on_cpu(packed(False))), ModelError,
     "full_parameters(): parameter 'weight' of layer 'layers.0.first.base' is a quantized Int8; "
     "needed unquantized weights; send only the adapters (peft.get_peft_model_state_dict), to "
     "an engine with the same base"),
    "compiled before": (lambda: megacompile(compiled(), device="cpu"), OptionError,
     "megacompile(): Linear was compiled with model.compile() already; leave out that call: "
     "megacompile compiles the model"),
    "explain before a call": (lambda: explain(on_cpu()), ModelError,
     "explain(): Stack has no schedule: it has not been called yet; call model(...), or a "
     "module in it, on a batch first"),
    "trace nothing": (trace, ModelError,
     "trace(): got no model; needed at least one"),
    "megacompiled inside": (lambda: inside(True), ModelError,
     "Sequential.0 is megacompiled itself; megacompile only the outermost module that is called "
     "(copy.deepcopy of the other is a plain module)"),
    "inside of a megacompiled one": (lambda: inside(False), ModelError,
     "megacompile(): parameter Block.norm.weight is owned by another megacompiled model "
     "(Stack.layers.1.norm.weight there), and a parameter has one owner; megacompile one module "
     "that has both and calls them, give one of them a copy of the parameter, or call "
     "megacompile.unmegacompile() on the other model"),
    "no CUDA device": (lambda: megacompile(nn.Linear(2, 2), device="cuda"), OptionError,
     "megacompile(): got device='cuda', but this machine has no CUDA device "
     "(torch.cuda.is_available() is False); use device='cpu' or leave it out"),
    "host memory for the parameters": (
     lambda: megacompile(nn.Linear(1024, 1024), device="cpu", host_memory="1MiB"), HostMemoryError,
     "megacompile(): host memory is too small\n"
     "  parameters to move to the host         0 B\n"
     "  one bucket, while moving             4 MiB\n"
     "  gradients                            4 MiB\n"
     "  needed                               8 MiB\n"
     "  available                            1 MiB\n"
     "free host memory (or raise host_memory=), use a smaller dtype (model.bfloat16()), or "
     "freeze parameters (requires_grad_(False)), which need no gradients"),
    "backward twice": (twice, BackwardError,
     "Stack: backward() a second time, but the first one freed its saved tensors; call the "
     "first with retain_graph=True"),
    "compiled autograd": (compiled_autograd, BackwardError,
     "Stack: backward() in compiled autograd{}"),
    "double backward": (double_backward, BackwardError,
     "Stack: backward() with create_graph=True: megacompile does not differentiate twice; "
     "compute this loss with the plain model"),
    "a parameter in place": (lambda: changed(edit), BackwardError,
     "Stack: parameter 'layers.1.up.weight' was changed in place between the forward and its "
     "backward; call backward() before optimizer.step()"),
    "a parameter replaced": (lambda: changed(replace_parameter), BackwardError,
     "Stack: parameters were replaced between the forward and its backward; call backward() "
     "before you replace them"),
    "an input in place": (lambda: changed(lambda given: given[1]["x"].add_(1)), BackwardError,
     "Stack: input {} of shape (4, 16) was changed in place since the forward, and the backward "
     "needs its old value; change a copy (.clone()), or call backward() first"),
}  # fmt: skip
OPTIONS: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (on_cpu, {"lookahead": 1.0}, OptionError, "got lookahead=1.0; needed an int of at least 1"),
    (on_cpu, {"lowering": True}, OptionError,
     "got lowering=True; needed one of 'eager', 'inductor'"),
    (on_cpu, {"activations": "ofload"}, OptionError,
     "got activations='ofload'; needed one of 'auto', 'keep', 'selective', 'recompute', 'offload'; "
     "did you mean offload?"),
    (on_cpu, {"gpu_memroy": "24GiB"}, OptionError,
     "there is no option gpu_memroy=; did you mean gpu_memory?"),
    (on_cpu, {"fullgraph": True}, OptionError,
     "there is no option fullgraph=; needed one of device, gpu_memory, {}, detect_anomaly"),
    (on_cpu, {"optimizer": torch.optim.AdamW}, OptionError,
     "got optimizer=the class AdamW (create it: AdamW(model.parameters())); needed one that can "
     "update in the backward: {}"),
    (on_cpu, {"gpu_memory": "20 bananas"}, OptionError,
     "got gpu_memory='20 bananas'; needed bytes{}"),
    (on_cpu, {"lookahead": 3, "slots": 3}, OptionError,
     "got slots=3 with lookahead=3; a prefetch 3 stages ahead needs at least 4 slots; raise "
     "slots or lower lookahead"),
    (on_cpu, {"resident": 'some'}, OptionError,
     "got resident='some'; needed 'auto', 'all', bytes (an int), a string such as "
     '"20GiB", or a fraction of the total (0 < f <= 1)'),
    (again, {"lookahead": 1}, OptionError,
     "Stack is megacompiled already, with other options; call it once, with the options you want"),
]  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_messages(name: str) -> None:
    if "no CUDA device" in ROWS[name][2] and torch.cuda.is_available():
        pytest.skip("there is one")
    assert_says(*ROWS[name])


def test_messages_of_options() -> None:
    for provoke, given, error, text in OPTIONS:
        assert_says(lambda: provoke(**given), error, f"megacompile(): {text}")  # noqa: B023


X = torch.ones(2, 8)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def in_eager(module: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(in_eager(self.a, x))


class InALoop(Breaks):
    """Dynamo has no list of its breaks."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = nn.functional.linear(x, self.a.weight)
            torch._dynamo.graph_break()
        return self.b(x)


def moved() -> None:
    model = on_cpu()
    assert model.to("cpu") is model and model.cpu().float() is model, "says nothing"
    for _ in range(2):
        assert model.to("meta") is model
    assert all(p.device.type == "cpu" for p in model.parameters())


WARNINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "a graph break": (lambda: [*map(on_cpu(Breaks()), [X] * 3)],
     "megacompile: {} (in_eager) runs in eager mode and fetches 1 of 2 parameters (256 B of 1 "
     "KiB, 25 %) at each use, unless they are on the device (slower, same numbers; shown once): "
     "a graph break at {} (forward): {}; TORCH_LOGS=graph_breaks shows more"),
    "a function that is skipped": (lambda: on_cpu(InALoop())(X),
     "megacompile: {} (forward) runs in eager mode and fetches 2 of 2 parameters (1 KiB of 1 "
     "KiB, 100 %) at each use, unless they are on the device (slower, same numbers; shown "
     "once): a graph break at {} (forward): {}; TORCH_LOGS=graph_breaks shows more"),
    "moved": (moved,
     "megacompile: parameters stay in host memory and are streamed to the device; "
     "model.to(device) moved only buffers (shown once)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(name: str) -> None:
    provoke, text = WARNINGS[name]
    assert_says(provoke, UserWarning, text)
