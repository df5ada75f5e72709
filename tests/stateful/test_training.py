"""A state machine of what a training loop may do; a plain model does the same and is compared.

What the user sees of each action must be equal in every bit, and it raises where the plain one
does. To look waits for updates in flight, so the whole state is compared where the machine draws
it, and at the end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import tempfile
import warnings
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megacompile import megacompile, released, unmegacompile
from megacompile.errors import BackwardError, ModelError, OptimizerError
from tests import adversary, inside
from tests.draws import settings
from tests.interrupts import Places, traced
from tests.stateful import side as loops
from tests.stateful.late import AtCall, failing, late
from tests.stateful.side import Side, copied
from tests.zoo import difference


@dataclasses.dataclass(frozen=True)
class Config:
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    breaks: str = ""  # of the graph: see `side.Net`
    late: bool = False  # updates are made when somebody waits
    adversarial: bool = False  # streams run in any order
    in_backward: bool = False  # the update
    anew: bool = False  # sizes, modes and modules may change: then it is captured anew, for seconds
    examples: int = 4  # loops that are drawn
    rtol: float = 0.0  # where sums have another order


COMPILED: dict[str, Any] = {"lowering": "inductor", "resident": 0}
CONFIGS = {
    "late": Config({"resident": 0}, late=True, anew=True, examples=8),
    "adversary": Config({"resident": "400"}, late=True, adversarial=True),
    "resident": Config({"resident": "all"}),
    "recompute": Config({"activations": "recompute", "slots": 2, "lookahead": 1, "resident": 0}),
    "broken": Config({"resident": 0}, breaks="shared", late=True, anew=True),
    "disk": Config({"disk": tempfile.gettempdir(), "resident": 0}),
    "planned": Config({"gpu_memory": 2**16}, late=True, anew=True, examples=3),
    "in backward": Config(in_backward=True, examples=8, rtol=1e-5),
    "in backward, broken": Config(in_backward=True, breaks="fails", rtol=1e-5),
    "compiled": Config({**COMPILED, "device_update": 0}, rtol=1e-4),
    "compiled, on the device": Config({**COMPILED, "device_update": 1.0}, examples=8, rtol=1e-4),
    "compiled, resident": Config({**COMPILED, "resident": "all"}, rtol=1e-4),
    "offloaded": Config({"activations": "offload", "resident": 0}, late=True, adversarial=True),
}


STEPS = 40  # that a loop has at most
FAILS = ("forward", "loss", "hook", "behind", "pre hook", "post hook", "closure")


class Pair:
    """The two models of a configuration, which are captured once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        torch.manual_seed(0)
        model = loops.Net(config.breaks)
        plain = copy.deepcopy(model)
        options = dict(config.options)
        optimizers: list[Any] = [None, None]
        if config.in_backward:
            optimizers = [loops.OPTIMIZERS["adamw"](list(m.parameters())) for m in (plain, model)]
            options["optimizer"] = optimizers[1]
        self.options, self.policy = options, adversary.Random(0)
        self.megacompile(model)
        self.plain = Side(plain, compiled=False, updates=optimizers[0])
        self.ours = Side(model, compiled=True, updates=optimizers[1])

    def megacompile(self, model: Any) -> None:
        """Again, if it is a plain one."""
        if not inside.is_streamed(model):
            given = {"lowering": "eager", **self.options}
            megacompile(model, device="cpu", progress=False, **given)
            self.device = adversary.attach(model) if self.config.adversarial else None
            if self.config.late:
                late(model)
        if self.device is not None:
            self.device.policy = self.policy


def act(name: str, *draws: Any, first: str = "", when: Any = lambda self: True) -> Any:
    """A rule that does what `Side` calls so, after what `first` names; `when` it may be drawn."""

    def run(self: Any, given: tuple[Any, ...]) -> None:
        for each in first.split():
            self.both(each)
        self.both(name, *given)

    run.__name__ = name
    return precondition(when)(rule(given=st.tuples(*draws))(run))


NUMBERS = st.integers(0, 9)
SEEDS = st.integers(0, 9)
OPTIONS = st.sampled_from(  # constructors refuse a negative lr, steps take it: schedulers make one
    [("lr", 1e-3), ("lr", -1e-2), ("lr", 0.0), ("weight_decay", 0.2), ("momentum", 0.5)]
)
RESTORED = ("all", "model", "optimizer")
HALVES = st.sampled_from([(True, True), (True, False), (False, True)])  # of a checkpoint


class Both(RuleBasedStateMachine):
    """Both sides do the same, and are compared."""

    loaded = False  # since the last step: the next one moves the states that were loaded

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair, self.plain, self.ours = pair, pair.plain, pair.ours
        self.rtol = pair.config.rtol

    @property
    def anew(self) -> bool:
        """May the model be captured again?"""
        return self.pair.config.anew

    def both(self, act: str, *args: Any) -> None:
        """Both do it, and show the same or raise."""
        results = []
        for each in (self.plain, self.ours):
            torch.manual_seed(1)
            try:
                results.append(getattr(each, act)(*args))
            except (RuntimeError, ValueError, TypeError, loops.Planted) as error:
                results.append(error)
        wanted, got = results
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            if not isinstance(got, Exception):
                raise AssertionError(f"{act}: no error as {wanted!r}")
            if not isinstance(wanted, Exception):
                raise got
            self.restart()
        elif where := difference(wanted, got, self.rtol):
            raise AssertionError(f"{act}{args}: {where}")

    def restart(self) -> None:
        """Behind an error: what was computed so far is dropped."""
        for each in (self.plain, self.ours):
            each.drop()
            each.model.train()
            each.model.zero_grad()
            each.other.grad = None

    def compare(self) -> None:
        if where := difference(self.plain.shape(), self.ours.shape(), self.rtol):
            raise AssertionError(f"{where}")

    def refused(self, bad: loops.Bad, number: int, act: str, *args: Any) -> None:
        """What cannot be updated is refused before anything changes; it is as it was then."""
        optimizer, given = self.ours.optimizers[0], self.ours.updates is not None
        params = [p for n, p in self.ours.params.items() if p.dim() == 2 and "spare" not in n]
        matrices = [p for p in params if given or p.grad is not None]
        if not matrices:
            return
        with loops.spoilt(optimizer, matrices[number % len(matrices)], bad) as able:
            before = self.ours.shape(buffers=False)
            if able:
                with pytest.raises(OptimizerError):
                    getattr(self.ours, act)(*args)
                assert not difference(before, self.ours.shape(buffers=False))
        self.load_plain()  # buffers may have changed

    def interrupted(self, act: str, at: int, *args: Any) -> None:
        """Ctrl-C in what the megacompiled side does; then a checkpoint is loaded."""
        places = Places(at)
        with contextlib.suppress(KeyboardInterrupt, RuntimeError), traced(places):
            getattr(self.ours, act)(*args)
        if hypothesis.currently_in_test_context():
            hypothesis.note(f"interrupted at {places.stopped}")
        assert not inside.has_proxies(self.ours.model), places.stopped
        if not places.stopped:
            with contextlib.suppress(RuntimeError):
                getattr(self.plain, act)(*args)
        self.load_plain()

    def load_plain(self, *, copying: bool = False) -> None:
        """A checkpoint of the other side, `copying` the parameters in place."""
        self.restart()
        if copying:
            sides = [[*m.parameters(), *m.buffers()] for m in (self.plain.model, self.ours.model)]
            with torch.no_grad():
                for theirs, mine in zip(*sides, strict=True):
                    mine.copy_(theirs)
        else:
            self.ours.model.load_state_dict(self.plain.model.state_dict())
        self.ours.other.data.copy_(self.plain.other.data)
        for mine, theirs in zip(self.plain.optimizers, self.ours.optimizers, strict=True):
            theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
        for each in (self.plain, self.ours):
            each.forget()
            for found in each.seen:
                found.clear()

    options = act("options", OPTIONS)
    save = act("save", st.sampled_from(["file", "deepcopy"]))
    copied_model = act("copied_model", st.sampled_from(["deepcopy", "pickle"]))

    @rule(mode=st.sampled_from(["eval", "train", "inference"]))
    def evaluate(self, mode: str) -> None:
        self.both("evaluate", 3, mode if self.anew else "eval")

    @rule(number=NUMBERS, use=st.sampled_from(loops.USES))
    def look(self, number: int, use: str) -> None:
        gone = self.pair.config.in_backward and use == "grad"
        costly = use == "layer" and not self.anew  # it is captured by itself
        self.both("look", number, "value" if gone or costly else use)

    write_alias = act(
        "write_alias", st.integers(0, 3), first="drop", when=lambda self: self.plain.aliases
    )

    @rule(given=st.tuples(NUMBERS, st.sampled_from(loops.STATES)))
    def state(self, given: tuple[int, str]) -> None:
        """But where two optimizers have loaded one state: a tensor that is set in one's is then
        taken over into the memory of both. limits.md: a state that is deleted, and held."""
        if given[1] == "deleted":
            self.both("forget")
        if given[1] != "set" or len(self.plain.optimizers) == 1:
            self.both("state", *given)

    @precondition(lambda self: self.plain.saved is not None)
    @rule(halves=HALVES)
    def load(self, halves: tuple[bool, bool]) -> None:
        for each in ("drop", "forget"):
            self.both(each)
        self.both("load", halves)
        self.loaded = True

    @rule(number=NUMBERS)
    def released(self, number: int) -> None:
        """All is there to be read and written; nothing runs."""
        self.both("drop")
        gc.collect()  # frames of errors hold losses
        model = self.ours.model
        placed = inside.residents(model)
        with released(model):
            assert self.ours.nodes or not inside.residents(model)
            assert not inside.machine(model).slots.buffers
            if self.pair.config.options.get("resident") == "all":
                self.compare()
            if not self.plain.aliases:  # which stay where they are
                self.both("write", number, "in place", 0.5)
            uses: list[Any] = [lambda: model(loops.inputs(3, 1)), lambda: unmegacompile(model)]
            for use in uses:
                with pytest.raises(ModelError):
                    use()
        assert inside.residents(model) == placed

    @rule()
    def look_at_all(self) -> None:
        self.compare()

    def teardown(self) -> None:
        try:
            if self.plain.optimizers:
                self.compare()
        finally:
            for each in (self.plain, self.ours):
                each.end()


class Training(Both):
    """A loop that may do anything."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.tied = self.stepped = self.frozen = False
        self.replaced = True  # maybe: parameters of another layout move in the next call

    # --- rules

    @initialize(
        kind=st.sampled_from(list(loops.OPTIMIZERS)), whole=st.booleans(), seed=st.integers(0, 99)
    )
    def begin(self, kind: str, whole: bool, seed: int) -> None:
        self.pair.policy = adversary.Random(seed)
        self.pair.megacompile(self.ours.model)  # an example that failed may have left it plain
        for each in (self.plain, self.ours):
            each.reset(kind, whole=whole)

    @rule(rows=st.sampled_from([3, 4]), seed=SEEDS, extra=st.sampled_from(loops.EXTRAS))
    def forward(self, rows: int, seed: int, extra: str) -> None:
        if len(self.plain.losses) < 3:
            extra, rows = "" if self.tied else extra, rows if self.anew else 3
            self.both("forward", rows, seed, extra, self.anew and seed == 0)
            self.replaced = False

    backward = act(
        *("backward", st.integers(0, 2)),
        st.sampled_from(["", "", "", "retain", "thread", "grad", "inputs"]),
        when=lambda self: self.plain.losses,
    )

    @rule(seed=SEEDS, extra=st.sampled_from(loops.EXTRAS), retain=st.booleans())
    def micro_batch(self, seed: int, extra: str, retain: bool) -> None:
        self.forward(3, seed, extra)
        if self.plain.losses:
            self.both("backward", len(self.plain.losses) - 1, "retain" if retain else "")

    @rule(seed=SEEDS, to_none=st.sampled_from([None, None, True, False]))
    def ordinary_step(self, seed: int, to_none: bool | None) -> None:
        """What most loops do, so that what is unusual comes between."""
        self.both("drop")
        if to_none is not None:
            self.both("zero_grad", to_none, True)
        self.micro_batch(seed, "", False)
        self.step(0)

    another_micro_batch, another_step = micro_batch, ordinary_step  # they are drawn twice as often

    all_backwards = act(
        "all_backwards", when=lambda self: len(self.plain.losses) > 1 and not self.tied
    )

    @rule(where=st.sampled_from(FAILS), number=NUMBERS)
    def fail(self, where: str, number: int) -> None:
        if self.plain.losses or where not in ("loss", "hook", "behind"):
            self.both("fail", where, number)

    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        self.both("step", which)
        self.stepped = True

    @precondition(lambda self: not self.plain.hooks and not self.tied)
    @rule(seed=SEEDS, number=NUMBERS, bad=st.sampled_from([*loops.BAD, *loops.BAD_FOR_TORCH]))
    def bad_step(self, seed: int, number: int, bad: str) -> None:
        """Behind one that had nothing bad, with its gradients."""
        self.ordinary_step(seed, True)
        compiled = "lowering" in self.pair.options
        known = loops.BAD | ({} if compiled else loops.BAD_FOR_TORCH)
        stock = not compiled and inside.residents(self.ours.model)  # torch's own errors
        if bad in known and not stock:
            self.refused(known[bad], number, "step", 0)

    @precondition(lambda self: not self.plain.hooks and not self.plain.wrapped)
    @rule(nth=st.integers(1, 4))
    def unprepared_step(self, nth: int) -> None:
        """A part of it cannot be prepared, as when the compiler of its code fails. An optimizer
        that wraps another has changed the parameters by then."""
        before = self.ours.shape()
        fails = AtCall("prepare", nth, loops.Planted())
        try:
            with traced(fails):
                self.ours.step(0)
        except loops.Planted:
            assert not difference(before, self.ours.shape())
        else:
            self.plain.step(0)

    closure = act("closure", SEEDS, first="drop")
    zero_grad = act("zero_grad", st.booleans(), st.booleans())
    scaled = act("scaled", SEEDS, st.sampled_from([1024.0, 2.0**127]), first="drop")
    clip = act("clip", st.sampled_from([1e-3, 1e3]), st.booleans())
    schedule = act("schedule", when=lambda self: self.stepped)
    add_group = act("add_group")
    other_optimizer = act(
        *("other_optimizer", st.sampled_from(list(loops.OPTIMIZERS))),
        *(st.sampled_from(["", "copied", "shared"]), st.booleans()),
    )

    gradient = act("gradient", NUMBERS, st.sampled_from(loops.GRADIENTS))
    alias = act(  # one that is replaced is taken over in the next call
        *("alias", NUMBERS, st.sampled_from(loops.ALIASES)), when=lambda self: not self.replaced
    )
    forget = act("forget", when=lambda self: self.plain.aliases)

    hook = act(
        *("hook", NUMBERS, st.sampled_from(loops.HOOKS)),
        when=lambda self: len(self.plain.hooks) < 3,
    )
    step_hook = act("step_hook", when=lambda self: len(self.plain.hooks) < 3)
    unhook = act("unhook", when=lambda self: self.plain.hooks)
    fork = act("fork", when=lambda self: not self.replaced)  # or their memory may be shared

    @rule(number=NUMBERS, kind=st.sampled_from(loops.ALIASES), seed=SEEDS, clips=st.booleans())
    def step_over_an_alias(self, number: int, kind: str, seed: int, clips: bool) -> None:
        """Other names of memory are written between a backward and what uses it."""
        self.ordinary_step(seed, False)
        if not self.replaced:
            self.both("alias", number, kind)
            self.micro_batch(seed + 1, "", False)
            if self.plain.aliases:
                self.both("write_alias", -1)
        if clips:
            self.both("clip", 1e-3, True)
        self.step(0)
        self.both("forget")

    @rule(by=st.sampled_from(["share_memory()", "a pickle"]))
    def send(self, by: str) -> None:
        """Their memory is taken over again in the next call."""
        self.both("drop")
        self.both("forget")
        self.both("send", by)
        self.replaced = True

    @rule(number=NUMBERS, how=st.sampled_from(loops.WRITES), value=st.sampled_from([0.5, 0.25]))
    def write(self, number: int, how: str, value: float) -> None:
        self.both("drop")
        if how in ("data", "new data"):
            self.both("forget")
            self.replaced = True
        self.both("write", number, how, value)

    @rule()
    def swap_data(self) -> None:
        self.both("drop")
        self.both("forget")
        self.both("swap_data")
        self.replaced = True

    @precondition(lambda self: self.anew)
    @rule(sure=st.integers(0, 3))
    def freeze(self, sure: int) -> None:
        """A layer; or let it train again."""
        if sure == 0 or self.frozen:  # it is captured anew
            self.frozen = not self.frozen
            self.both("freeze", self.frozen)

    @precondition(lambda self: self.anew and not self.tied)
    @rule(sure=st.integers(0, 3))
    def tie(self, sure: int) -> None:
        if sure == 0:  # it is captured anew
            for each in ("drop", "forget", "tie"):
                self.both(each)
            self.tied = self.replaced = True

    @precondition(lambda self: not self.plain.hooks)
    @rule(adding=st.booleans(), seed=SEEDS, nth=st.integers(1, 40))
    def failing_op(self, adding: bool, seed: int, nth: int) -> None:
        """In a forward or a backward; each gradient is what it was, or has the new one whole."""
        self.both("drop")
        if not adding:
            self.both("zero_grad", True, True)
        before = {name: copied(param.grad) for name, param in self.ours.params.items()}
        error = (loops.Planted, KeyboardInterrupt)[nth % 2]
        with contextlib.suppress(error), traced(AtCall("_issue", nth, error())):
            self.ours.forward(3, seed, "", False)
            self.ours.backward(0, "")
        self.plain.forward(3, seed, "", False)
        self.plain.backward(0, "")
        for name, param in self.ours.params.items():
            wanted = (before[name], self.plain.params[name].grad)
            assert any(not difference(param.grad, each, self.rtol) for each in wanted), name
        self.load_plain()  # buffers may have changed

    @precondition(lambda self: self.anew and not self.plain.hooks)
    @rule(sure=st.integers(0, 3), at=st.integers(0, 3600))
    def unmegacompiled(self, sure: int, at: int) -> None:
        """It is plain, or Ctrl-C came in between, for a step, and then megacompiled again."""
        if sure == 0:
            for each in ("drop", "forget"):
                self.both(each)
            with contextlib.suppress(KeyboardInterrupt), traced(Places(at)):
                unmegacompile(self.ours.model)
            self.ordinary_step(at % 10, None)
            self.pair.megacompile(self.ours.model)

    @rule(act=st.sampled_from(["forward", "backward", "step", "evaluate"]), at=st.integers(1, 1700))
    def interrupt(self, act: str, at: int) -> None:
        args: dict[str, tuple[Any, ...]] = {
            "forward": (3, 1, "", False),
            "backward": (0, ""),
            "step": (0,),
            "evaluate": (3, "eval"),
        }
        threads = "disk" in self.pair.config.options  # whose moment no draw decides
        if not threads and (act != "backward" or self.plain.losses):
            self.interrupted(act, at, *args[act])

    def do_each(self) -> None:
        """What is drawn too seldom: each other name of memory, each gradient and state that is
        set, a gradient that is added to some parameters alone, what no step goes on from, and
        Ctrl-C while parameters are taken over."""
        for kind in ("adamw", "sgd", "rmsprop", "adam, amsgrad"):
            self.begin(kind, True, 0)
            for k, name in enumerate(loops.ALIASES):
                for clips in (True, False):
                    self.step_over_an_alias(k, name, k, clips)
            for k, how in enumerate(loops.GRADIENTS):
                self.ordinary_step(k, True)
                self.both("gradient", 2, how)
                self.step(0)
            for how in loops.STATES:  # of the step whose update is in flight
                self.micro_batch(0, "", False)
                self.step(0)
                self.state((2, how))
                self.step(0)
            self.micro_batch(0, "", False)
            self.forward(3, 1, "")
            self.both("backward", 0, "inputs")
            self.step(0)
            self.both("closure", 2)
            for bad, (kinds, *_) in (loops.BAD | loops.BAD_FOR_TORCH).items():
                if type(self.ours.optimizers[0]) in kinds:
                    self.bad_step(2, 0, bad)
        for at in range(1, 3000, 300) if self.anew else ():  # while parameters are taken over
            self.both("swap_data")
            self.interrupt("forward", at)
        self.teardown()


class Updating(Both):
    """A loop whose backward updates; it is equal but for rounding."""

    @initialize()
    def begin(self) -> None:
        for each in (self.plain, self.ours):
            each.reset("adamw", whole=True)

    @rule(seed=SEEDS, micro=st.integers(1, 2), wrapped=st.booleans())
    def whole_step(self, seed: int, micro: int, wrapped: bool) -> None:
        self.both("whole_step", seed, micro, wrapped)
        self.loaded = False

    step_of_the_head = act("step_of_the_head", SEEDS)

    @precondition(lambda self: not self.pair.config.breaks)
    @rule(seed=SEEDS, extra=st.sampled_from(["penalty", "head", "view", "twice"]))
    def used_outside(self, seed: int, extra: str) -> None:
        """The gradient has parts that come from elsewhere: nothing is updated."""
        self.both("forward", 3, seed, extra, False)
        with pytest.raises(BackwardError):
            self.ours.backward(0, "")
        self.restart()
        self.compare()
        self.whole_step(seed, 1, False)

    @precondition(lambda self: not self.pair.config.breaks)
    @rule(seed=SEEDS, kind=st.sampled_from(["sgd, plain", "rmsprop"]), first=st.booleans())
    def second_optimizer(self, seed: int, kind: str, first: bool) -> None:
        """It finds no gradients, ahead of the step and behind it: it updates nothing."""
        self.both("forward", 3, seed, "", False)
        self.both("backward", 0, "")
        second = loops.OPTIMIZERS[kind](list(self.ours.model.head.parameters()))
        for begins in (True, False):
            if begins == first:
                with pytest.raises(OptimizerError):
                    second.step()
            if begins:
                self.both("step", 0)
        self.both("zero_grad", True, False)
        self.compare()

    write = act(
        *("write", NUMBERS, st.sampled_from(["in place", "init", "foreach", "part"])), st.just(0.5)
    )

    @rule(number=NUMBERS, kind=st.sampled_from(["detach", "view", "state"]))
    def alias(self, number: int, kind: str) -> None:
        if kind != "state" or not self.loaded:
            self.both("alias", number, kind)

    @precondition(lambda self: not self.pair.config.breaks)
    @rule(seed=SEEDS, number=NUMBERS, bad=st.sampled_from(list(loops.BAD)))
    def bad_step(self, seed: int, number: int, bad: str) -> None:
        self.both("whole_step", seed, 1)
        self.loaded = False
        self.refused(loops.BAD[bad], number, "whole_step", seed, 1)

    @precondition(lambda self: self.pair.config.breaks)
    @rule(seed=SEEDS, copying=st.booleans(), told=st.booleans(), what=st.sampled_from(RESTORED))
    def half_updated(self, seed: int, copying: bool, told: bool, what: str) -> None:
        """By a backward that fails: it is refused until a checkpoint is loaded, all of it."""
        model, (optimizer,) = self.ours.model, self.ours.optimizers
        self.both("whole_step", seed, 1)  # there are states
        self.both("forget")
        uses: list[Any] = [lambda: self.ours.whole_step(seed, 1), optimizer.step]

        def refused(*more: Any) -> None:
            for use in (*uses, *more) if told else ():
                with pytest.raises(OptimizerError):
                    use()

        with failing():
            self.ours.whole_step(seed, 1)
        self.restart()
        refused(model.state_dict, optimizer.state_dict)
        if what == "model":
            model.load_state_dict(self.plain.model.state_dict())
        if what == "optimizer":
            optimizer.load_state_dict(copy.deepcopy(self.plain.optimizers[0].state_dict()))
        refused()
        self.load_plain(copying=copying)
        self.compare()
        self.loaded = True

    @precondition(lambda self: not self.pair.config.breaks)
    @rule(at=st.integers(1, 3500))
    def interrupt(self, at: int) -> None:
        self.interrupted("whole_step", at, 1, 1)
        self.loaded = True


def run(config: str, examples: int, *, seed: int = 0, shrink: bool = False) -> None:
    if "lowering" in CONFIGS[config].options and not inside.has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    pair = Pair(CONFIGS[config])
    kind: type[Both] = Updating if CONFIGS[config].in_backward else Training
    run_machine: Any = run_state_machine_as_test  # has no types in older versions
    make: Any = hypothesis.seed(seed + list(CONFIGS).index(config))(functools.partial(kind, pair))
    with contextlib.ExitStack() as stack:
        if pair.device is not None:
            stack.enter_context(adversary.adversarial())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        more = {"stateful_step_count": STEPS, "print_blob": False, "report_multiple_bugs": False}
        if kind is Training:
            Training(pair).do_each()
        run_machine(make, settings=settings(examples, shrink=shrink, **more))


@pytest.mark.parametrize("config", CONFIGS)
def test_training(config: str) -> None:
    """A loop that fails is not made smaller, which takes minutes: `make thorough` does that."""
    run(config, CONFIGS[config].examples)


@pytest.mark.thorough
@pytest.mark.parametrize("config", CONFIGS)
def test_training_for_longer(config: str) -> None:
    run(config, 20 * CONFIGS[config].examples, seed=100, shrink=True)
