"""What errors and warnings say that training loops meet: how each is provoked, and its text."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, RMSprop

from megacompile import full_parameters, megacompile, released, unmegacompile
from megacompile.errors import (
    DeviceMemoryError,
    ModelError,
    OptimizerError,
    OptionError,
)
from tests import inside
from tests.interrupts import traced
from tests.messages.said import assert_says
from tests.stateful.late import AtCall, late

Said = Callable[[], object]


class Net(nn.Module):
    def __init__(self, ends: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.ends == "unmegacompile":
            torch._dynamo.graph_break()
            unmegacompile(self)
        if self.ends == "hook":
            hidden.register_hook(self.hook)
        return self.last(hidden.tanh())

    def hook(self, grad: Tensor) -> None:
        with torch.no_grad():
            self.last.bias.mul_(0.5)


X = torch.ones(2, 8)


def made(ends: str = "", **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"device": "cpu", "lowering": "eager", "progress": False, **options}
    return megacompile(Net(ends), **given)


def backward(model: Any) -> None:
    model(X).square().mean().backward()


def stepped(**options: Any) -> tuple[Any, AdamW]:
    """A model and its optimizer, which has stepped."""
    model = made(**options)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def updating() -> tuple[Any, AdamW]:
    """A model whose backward updates."""
    torch.manual_seed(0)
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    megacompile(model, device="cpu", lowering="eager", progress=False, optimizer=optimizer)
    return model, optimizer


def failed() -> tuple[Any, AdamW]:
    """An update has failed in the background."""
    model, optimizer = stepped()
    backward(model)
    workers = late(model)
    (workers.fails,) = inside.buckets(model)
    optimizer.step()
    return model, optimizer


def called_inside() -> None:
    model, _ = stepped()
    with released(model):
        model(X)


def released_before_backward() -> None:
    model = made()
    loss = model(X)
    with released(model):
        loss.sum()


def released_without_memory() -> None:
    model, _ = stepped(resident="all")
    ends = AtCall("move_bucket", 2, torch.OutOfMemoryError("CUDA out of memory"))
    with traced(ends), released(model):
        pass


def came_since() -> None:
    model = made()
    model.extra = nn.Linear(2, 2)
    full_parameters(model)


def ended_in_a_call() -> None:
    made("unmegacompile")(X)


def ended_before_the_step() -> None:
    model, _ = updating()
    backward(model)
    unmegacompile(model)


def traced_by_func() -> None:
    model = made()
    torch.func.grad(lambda x: model(x).sum())(X)


def update_that_failed() -> None:
    model, _ = failed()
    model.last.weight.sum()


def use_of_what_is_torn() -> None:
    model, _ = failed()
    with pytest.raises(OptimizerError):
        model.last.weight.sum()
    model.last.weight.sum()


def unknown_parameter() -> None:
    model, optimizer = updating()
    params = optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not model.last.bias]
    backward(model)


def bad(change: Callable[[Any, Any], Any]) -> Said:
    def provoke() -> None:
        model, optimizer = stepped()
        backward(model)
        change(optimizer, optimizer.state[model.last.weight])
        optimizer.step()

    return provoke


def put(states: dict[str, Any], name: str, value: Any) -> None:
    states[name] = value


def option(name: str, value: Any) -> Said:
    return bad(lambda optimizer, _: put(optimizer.param_groups[0], name, value))


def a_state(name: str, value: Callable[[Tensor], Any]) -> Said:
    return bad(lambda _, states: put(states, name, value(states[name] + 0)))


def unknown_optimizer() -> None:
    model = made()
    backward(model)
    RMSprop(model.parameters()).step()


def sent_to_a_process() -> None:
    model, _ = stepped()
    ForkingPickler.dumps(list(model.parameters()))
    model(X)


def changes_a_parameter() -> None:
    backward(made("hook"))


RESET = (
    "nothing was updated: load a checkpoint of this model and optimizer, or reset the state of "
    "this parameter: del optimizer.state[param]"
)
DENSE = f"needed a dense floating-point tensor of shape (4, 8); {RESET}"
OF_LAST = "AdamW.step(): the state '{}' of parameter 'last.weight'"
ROWS: dict[str, tuple[Said, type[Exception], str]] = {
    "called_inside": (called_inside, ModelError,
     "Net: used inside of `with megacompile.released(model):`, where it has no device memory; "
     "call it, and optimizer.step(), after the block (inside, "
     "megacompile.full_parameters(model) yields its parameters)"),
    "released_before_backward": (released_before_backward, ModelError,
     "released(): a forward of Net waits for its backward, whose tensors are on the device; "
     "call backward() first, delete its outputs (del loss), or evaluate under torch.no_grad()"),
    "released_without_memory": (released_without_memory, DeviceMemoryError,
     "released(): 1 KiB of Net live on the device, and could not return to the device (CUDA out "
     "of memory); free the other engine's memory before the block ends; the next call of the "
     "model tries again"),
    "came_since": (came_since, ModelError,
     "full_parameters(): parameter 'extra.weight' was added since the last call, and is in no "
     "bucket yet; call the model once first"),
    "ended_in_a_call": (ended_in_a_call, ModelError,
     "unmegacompile(): Net is in the middle of a call; call it between two steps"),
    "ended_before_the_step": (ended_before_the_step, ModelError,
     "unmegacompile(): the backward of Net has run an update that optimizer.step() has not "
     "counted; call optimizer.step() first"),
    "ended_on_meta": (lambda: unmegacompile(made(), device="meta"), OptionError,
     "megacompile(): got device='meta'; needed a 'cuda' device or 'cpu'"),
    "traced_by_func": (traced_by_func, ModelError,
     "Net: called within torch.func, which needs ordinary parameters; use a plain model there: "
     "copy.deepcopy(model)"),
    "update_that_failed": (update_that_failed, OptimizerError,
     "optimizer.step(): the update of 'Net' failed in the background with ArithmeticError: out "
     "of numbers; its parameters and states are half updated: load a checkpoint"),
    "use_of_what_is_torn": (use_of_what_is_torn, OptimizerError,
     "parameters and optimizer states are half updated, so they cannot be used or saved: load a "
     "checkpoint into the model and the optimizer (load_state_dict() of both). What failed: "
     "optimizer.step(): the update of 'Net' failed in the background with ArithmeticError: out "
     "of numbers; its parameters and states are half updated: load a checkpoint"),
    "unknown_parameter": (unknown_parameter, OptimizerError,
     "backward(): parameter 'last.bias' is not in the AdamW of megacompile(model, "
     "optimizer=...), which updates in the backward (nothing was updated); add it: "
     "optimizer.add_param_group({'params': [...]}), or freeze it (requires_grad_(False))"),
    "lr_is_text": (option("lr", "0.1"), OptimizerError,
     "AdamW.step(): param_groups[0] has lr='0.1' (str); needed a number; nothing was updated: "
     "set optimizer.param_groups[0]['lr'], and call it again"),
    "amsgrad_later": (option("amsgrad", True), OptimizerError,
     "AdamW.step(): the state 'max_exp_avg_sq' of parameter 'first.weight' is missing; "
     f"needed a dense floating-point tensor of shape (8, 8); {RESET}"),
    "no_eps": (bad(lambda optimizer, _: optimizer.param_groups[0].pop("eps")), OptimizerError,
     "AdamW.step(): param_groups[0] has no eps; needed a number; nothing was updated: set "
     "optimizer.param_groups[0]['eps'], and call it again"),
    "half_a_state": (a_state("exp_avg", lambda t: t[:2]), OptimizerError,
     f"{OF_LAST.format('exp_avg')} is torch.float32, torch.strided, of shape (2, 8); {DENSE}"),
    "two_steps": (a_state("step", lambda t: t.expand(2).clone()), OptimizerError,
     f"{OF_LAST.format('step')} is torch.float32, torch.strided, of shape (2,); needed one "
     f"number; {RESET}"),
    "refused_by_torch": (a_state("exp_avg", lambda t: t.double()), OptimizerError,
     "AdamW.step(): torch.optim's own step rejects parameter 'last.weight' with RuntimeError: "
     "expected dtype double for `end` but got dtype float; nothing was updated: correct the "
     "options of its parameter group, or its state, and call it again"),
    "unknown_optimizer": (unknown_optimizer, UserWarning,
     "megacompile: RMSprop runs unchanged on the host, which is slower: "
     "torch.optim.rmsprop.RMSprop has no update in megacompile (AdamW, Adam, SGD, Lion, Muon and "
     "Adafactor of torch.optim and lion_pytorch have one) (shown once)"),
    "sent_to_a_process": (sent_to_a_process, UserWarning,
     "megacompile: parameter 'first.weight' (and maybe others) was moved to shared memory, by "
     "share_memory() or by sending it to another process. megacompile has moved it back: other "
     "processes keep the old values, and what they write has no effect here. Send state_dict() "
     "again for new values (shown once)"),
    "changes_a_parameter": (changes_a_parameter, UserWarning,
     "megacompile: Net is not scheduled and runs in eager mode, fetching 4 of 4 parameters (432 "
     "B of 432 B, 100 %) at each use, unless they are on the device (slower, same numbers): "
     "stage 'Net': a hook, or an autograd.Function, changes a tensor in place in the backward; "
     "change it after the backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_is_said(name: str) -> None:
    assert_says(*ROWS[name])
