"""It is always known what is streamed: calls of modules, and what is said where it is less."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from megacompile import MegacompileError, compat, full_parameters, megacompile, schedules
from megacompile.errors import ModelError, NoScheduleError
from megacompile.ir.capture import ParamInput
from megacompile.runtime.model.parts import Part
from tests import inside
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, stack, step, twins


class Task(nn.Module):
    """As a LightningModule: the loop calls its methods, which call modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.loss = nn.MSELoss()

    def training_step(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.norm(self.net(inputs["x"]))
        loss: Tensor = self.loss(self.head(hidden), inputs["y"])
        return loss

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.net(x)))
        return result


def both(model: nn.Module, loss: Callable[[Any, int], Tensor], steps: int = 3) -> tuple[Any, Any]:
    """Steps of a plain and a megacompiled model, which must be equal in every bit."""
    plain, model = twins(model)
    optimizers = [AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for i in range(steps):
        found = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(i)
            found.append(loss(each, i))
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert equal(found[0].detach(), found[1].detach())
        assert_same(plain, model)
    return plain, model


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if str(w.message).startswith("megacompile")]


def streamed_names(model: nn.Module) -> set[str]:
    """The parameters that some schedule reads."""
    found = set()
    for program in inside.programs(model):
        for given in program.capture.inputs:
            if isinstance(given, ParamInput):
                found.add(given.bucket.params[given.param].name)
    return found


# --- calls of modules in the model


def test_a_training_step_that_calls_modules() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, model = both(Task(), lambda m, i: m.training_step(batch(i)))
    assert not said(caught)
    assert len(schedules(model)) == 3
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}
    assert all(schedule.backward is not None for schedule in schedules(model))


CALLS: dict[str, Callable[[Any, int], Tensor]] = {
    "the model and a module": lambda m, i: m(batch(i)["x"]).sum() + m.net(**batch(i)),
    "a head outside": lambda m, i: F.mse_loss(m.head(m(batch(i)["x"])), batch(i)["y"]),
    "a layer": lambda m, i: m.net.layers[1](batch(i)["x"]).square().mean(),
    "one twice": lambda m, i: m.head(m.head(batch(i)["x"])).square().mean(),
    "keyword arguments": lambda m, i: m.net(x=batch(i)["x"], y=batch(i)["y"]),
    "a checkpoint": lambda m, i: checkpoint(
        m.net, *batch(i).values(), use_reentrant=False
    ),  # fmt: skip
    "a checkpoint with more": lambda m, i: checkpoint(
        lambda x: m.net(x.sin()).cos().sum(), batch(i)["x"], use_reentrant=False
    ),
    "a reentrant checkpoint": lambda m, i: checkpoint(
        m.net, batch(i)["x"].requires_grad_(), use_reentrant=True
    ).sum(),
    "in turns with the model": lambda m, i: (
        m(batch(i)["x"]).sum() if i % 2 else m.training_step(batch(i))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_modules(name: str) -> None:
    _, model = both(Task(), CALLS[name], steps=4)
    assert schedules(model)


def test_evaluation() -> None:
    plain, model = twins(Task())
    for each in (plain, model):
        each.eval()
    with torch.no_grad():
        assert equal(plain.net(batch()["x"]), model.net(batch()["x"]))
    with torch.inference_mode():
        assert equal(plain.head(batch()["x"]), model.head(batch()["x"]))
    assert len(schedules(model)) == 2


def test_a_generator_and_a_critic() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.judge = Stack(), nn.Linear(WIDTH, 1)

    plain, model = twins(Gan())
    for each in (plain, model):
        makes = AdamW(each.make.parameters(), lr=1e-2)
        judges = AdamW(each.judge.parameters(), lr=1e-2)
        for i in range(3):
            inputs = batch(i)
            made = each.make(inputs["x"])
            (each.judge(made.detach()).mean() - each.judge(inputs["y"]).mean()).backward()
            judges.step()
            judges.zero_grad()
            makes.zero_grad()
            (-each.judge(made).mean()).backward()
            makes.step()
            for optimizer in (makes, judges):
                optimizer.zero_grad()
    assert_same(plain, model)


def test_modules_that_came_since() -> None:
    plain, model = twins(Task())
    for each in (plain, model):
        torch.manual_seed(3)
        each.extra = nn.Linear(WIDTH, WIDTH)
        each.net(**batch()).backward()  # takes over again
    for each in (plain, model):
        each.extra(batch()["x"]).sum().backward()
    assert_same(plain, model)
    assert isinstance(model.extra._compiled_call_impl, Part)
    assert "extra.weight" in streamed_names(model)


def test_what_stays_as_it_is() -> None:
    """What computes a parameter, has none, or is traced."""
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))
    plain, model = twins(model)
    assert model[1]._compiled_call_impl is None
    assert equal(plain[0].weight.detach(), model[0].weight.detach())
    assert not inside.streamed(model).graphs, "a look at a parameter is no call"
    x = torch.ones(2, 8)
    torch.export.export(model[2], (x,))
    torch.func.vmap(model[2])(x)
    assert not inside.streamed(model).graphs
    assert equal(plain(x).detach(), model(x).detach())


def test_copies_are_plain() -> None:
    _, model = twins(Task())
    model.net(**batch())
    for made in (copy.deepcopy(model.net), pickle.loads(pickle.dumps(model.net))):
        assert not any(isinstance(m._compiled_call_impl, Part) for m in made.modules())
        made(**batch()).backward()


def test_a_part_does_not_keep_the_model() -> None:
    model = megacompile(Task(), device="cpu")
    net, streamed = model.net, weakref.ref(inside.streamed(model))
    net(**batch()).backward()
    del model
    gc.collect()
    assert streamed() is None
    net(**batch()).backward()  # plain
    megacompile(net, device="cpu")
    step(net, batch())
    assert schedules(net)


def test_the_model_does_not_keep_a_part_that_was_replaced() -> None:
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    model, x = megacompile(layers, device="cpu"), torch.ones(1, 4)
    model[0](x)
    model(x).sum().backward()
    part = weakref.ref(model[0])
    model[0] = nn.Identity()
    model(x).sum().backward()
    gc.collect()
    assert part() is None


def test_a_part_may_not_be_megacompiled() -> None:
    model = megacompile(Task(), device="cpu")
    with pytest.raises(ModelError, match=r"owned by another .*unmegacompile\(\)"):
        megacompile(model.net, device="cpu")


# --- what is said


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_eager(module: Any, x: Tensor) -> Tensor:
    result: Tensor = F.linear(x, module.weight)
    return result


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_in_eager(self.a, x))  # type: ignore[no-any-return]


def messages(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return said(caught)


def test_a_graph_break_is_said_with_its_share_place_and_reason() -> None:
    model = megacompile(Breaks(), device="cpu")
    (message,) = messages(lambda: [model(torch.ones(2, 8)) for _ in range(3)])
    assert "(_in_eager) runs in eager mode and fetches 1 of 2 parameters (256 B of 1" in message
    assert ", 25 %) at each use" in message
    line = Breaks.forward.__code__.co_firstlineno + 1
    assert f"a graph break at {__file__}:{line} (forward): Skip calling" in message


def test_a_break_in_the_forward_is_looked_for_in_its_own_frame() -> None:
    """Between the call and the forward no frame is traced, up to the break, for nothing."""
    torch._dynamo.utils.clear_compilation_metrics()
    megacompile(Breaks(), device="cpu")(torch.ones(2, 8))
    begun = [metrics.co_name for metrics in torch._dynamo.utils.get_compilation_metrics()]
    assert begun[1] == "forward" and "__call__" not in begun


class InALoop(Breaks):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.linear(x, self.a.weight)
            torch._dynamo.graph_break()
        return self.b(x)  # type: ignore[no-any-return]


def test_a_function_that_is_skipped() -> None:
    """A break in a loop: Dynamo has no list of those."""
    model = megacompile(InALoop(), device="cpu")
    (message,) = messages(lambda: model(torch.ones(2, 8)))
    assert "fetches 2 of 2 parameters" in message
    line = InALoop.forward.__code__.co_firstlineno + 3
    assert f"a graph break at {__file__}:{line} (forward): Call to" in message


@pytest.mark.parametrize("inside_a_model", [False, True])
def test_a_break_in_our_own_frames_is_not_another_models(inside_a_model: bool) -> None:
    """torch's own modules have no line of a user's code."""
    lstm: nn.Module = nn.LSTM(8, 8)
    user = Reads(lstm) if inside_a_model else lstm
    (message,) = messages(lambda: megacompile(user, device="cpu")(torch.ones(2, 8)))
    assert "Attempted to wrap RNN" in message
    assert ("(forward): Attempted" in message) == inside_a_model
    (message,) = messages(lambda: megacompile(InALoop(), device="cpu")(torch.ones(2, 8)))
    assert "RNN" not in message


class Reads(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)[0]
        return result


class Counts(nn.Module):
    """Another case at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.n = "0"

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x)
        return result * 2 if self.n == "odd" else result + len(self.n)


def test_a_limit_of_recompilations_is_no_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.CALL_OPTIONS, "recompile_limit", 8)
    model = megacompile(Counts(), device="cpu")

    def run() -> None:
        for i in range(12):
            model.n = f"case {i}"
            model(torch.ones(2, 8))

    (message,) = messages(run)
    assert "fetches 2 of 2 parameters (288 B of 288 B, 100 %)" in message
    assert "graph break" not in message
    assert "Dynamo has captured 'call_Counts'" in message and "times and gave up" in message
    assert "raise torch._dynamo.config.recompile_limit" in message


def test_capture_is_switched_off() -> None:
    model = megacompile(Breaks(), device="cpu")
    with torch.compiler.set_stance("force_eager"):
        (message,) = messages(lambda: model(torch.ones(2, 8)))
    assert "2 of 2 parameters" in message and "set_stance('force_eager')" in message
    with pytest.raises(NoScheduleError, match="captured nothing of it"):
        schedules(model)[0]


def test_an_unsupported_graph_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.unused = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.func.grad(lambda row: self.a(row).sum())(x)
            return result

    model = megacompile(Mapped(), device="cpu")
    found = messages(lambda: model(torch.ones(2, 8)))
    assert "is not scheduled and runs in eager mode, fetching 2 of 4 parameters" in found[0]
    with pytest.raises(NoScheduleError, match="ran in eager mode"):
        schedules(model)[-1]


USES: dict[str, tuple[Callable[[Any], Tensor], str, str]] = {
    "forward": (lambda m: m.head.forward(m.net(**batch())[None, None].expand(4, 16)).sum(),
                "2 of 36 parameters", "write model.head(...), not .forward(...)"),
    "a parameter": (lambda m: m.net(**batch()) + m.head.weight.square().sum(),
                    "1 of 36 parameters", "'head.weight' first"),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_what_no_call_sees_is_said_at_the_step(name: str) -> None:
    use, share, write = USES[name]

    class Plain(Task):
        def __init__(self) -> None:
            super().__init__()
            del self.norm

    model = megacompile(Plain(), device="cpu")
    total = len(list(model.parameters()))
    optimizer = SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            use(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    (message,) = messages(run)
    assert share.replace("36", str(total)) in message and write in message


def test_nothing_is_said_of_what_is_not_used() -> None:
    model = megacompile(Task(), device="cpu")
    optimizer = AdamW(model.parameters())

    def run() -> None:
        for _ in range(2):
            model.net(**batch()).backward()  # no head
            optimizer.step()

    assert messages(run) == []


# --- schedules() before a step


def test_schedules_before_a_step_say_what_to_do() -> None:
    model = megacompile(stack()[0], device="cpu")
    assert schedules(model) == []
    for index in (0, -1):
        with pytest.raises(NoScheduleError, match=r"call model\(...\) on a batch first"):
            schedules(model)[index]
    with pytest.raises(IndexError):
        schedules(model)[0]
    assert schedules(model)[:1] == []
    step(model, batch())
    assert schedules(model)[0].backward is not None
    with pytest.raises(IndexError, match="list index"):
        schedules(model)[9]
    assert issubclass(NoScheduleError, MegacompileError)


# --- an old loss keeps no model


@pytest.mark.parametrize("by_backward", [False, True])
def test_megacompiled_again_though_an_old_loss_lives(by_backward: bool) -> None:
    """As `merge_and_unload()` of PEFT: the inner model is taken out of the outer one."""
    outer = nn.Sequential(Stack())
    optimizer = AdamW(outer.parameters(), lr=1e-2)
    options: dict[str, Any] = {"optimizer": optimizer} if by_backward else {}
    megacompile(outer, device="cpu", lowering="eager", **options)
    old = outer(batch()["x"]).sum()
    inner, streamed = outer[0], weakref.ref(inside.streamed(outer))
    watched = weakref.ref(inside.streamed(outer).updates)
    del outer
    plain = copy.deepcopy(inner)
    megacompile(inner, device="cpu", lowering="eager")
    assert streamed() is None and watched() is None
    theirs = AdamW(plain.parameters(), lr=1e-2)
    ours = AdamW(inner.parameters(), lr=1e-2)
    for each, stepper in ((plain, theirs), (inner, ours)):
        for i in range(2):
            step(each, batch(i))
            stepper.step()
            stepper.zero_grad()
    assert_same(plain, inner)
    assert old.requires_grad


def test_an_old_loss_of_a_model_that_is_gone() -> None:
    """Gradients of inputs, as ever."""
    plain, model = twins(Stack())
    inputs = [batch()["x"].requires_grad_() for _ in range(2)]
    losses = [each(x).sum() for each, x in zip((plain, model), inputs, strict=True)]
    del plain, model
    gc.collect()
    for loss in losses:
        loss.backward()
    assert equal(inputs[0].grad, inputs[1].grad)


# --- with the libraries


def test_peft_merged_and_megacompiled_again() -> None:
    peft = pytest.importorskip("peft")
    from tests.zoo import hf_qwen2, tokens

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    base = hf_qwen2(vocab_size=64)
    plain, model = twins(peft.get_peft_model(base, config))
    inputs = tokens()
    losses = []
    for each in (plain, model):
        optimizer = SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            losses.append(each(**inputs).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    old = model(**inputs).loss  # lives
    plain = plain.merge_and_unload()
    model = model.merge_and_unload()
    del each, optimizer
    megacompile(model, device="cpu", lowering="eager")
    for each in (plain, model):
        each.requires_grad_(True)
        step(each, inputs)
    assert_same(plain, model)
    assert schedules(model)
    assert old.requires_grad


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    losses: dict[bool, list[float]] = {False: [], True: []}

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.head = Stack(), nn.Linear(WIDTH, WIDTH)

        def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor:
            loss = F.mse_loss(self.head(self.net(rows["x"])), rows["y"])
            losses[self.streams].append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return AdamW(self.parameters(), lr=1e-2)

    whole = batch(size=12)
    rows: Any = [{key: value[i] for key, value in whole.items()} for i in range(12)]
    for streams in (False, True):
        module = Module()
        module.streams = streams
        if streams:
            megacompile(module, device="cpu", lowering="eager")
        trainer = lightning.Trainer(
            max_steps=3,
            logger=False,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(rows, batch_size=4))
    assert losses[True] == losses[False] and len(losses[True]) == 3
    assert len(schedules(module)) == 2
    assert len(dict(full_parameters(module))) == len(list(module.parameters()))


def test_a_head_that_was_replaced_is_not_used_outside(recwarn: pytest.WarningsRecorder) -> None:
    """As many programs as before, of which one is another."""
    model = megacompile(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), device="cpu")
    for _ in range(2):
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[2] = nn.Linear(16, 4)
    assert not [w for w in recwarn if "no schedule has" in str(w.message)]
