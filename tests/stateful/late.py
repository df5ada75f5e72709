"""What comes at a bad moment: updates of host memory that are late, and errors. Late updates are
made when somebody waits for them, and no sooner: whoever uses a parameter, a gradient or a state
without waiting sees what was there before. No thread is needed, so tests are the same each time."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests import inside
from tests.interrupts import is_ours, traced


class Late:
    """In the place of the threads that make updates.

    Attributes:
        waited: the buckets that somebody waited for before they were done.
        ran: the buckets whose updates were made, in order.
        fails: the bucket whose update raises.
        breaks_at: how many updates a step starts before it breaks off; -1: it does not.
    """

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.ran: list[str] = []
        self.fails = ""
        self.breaks_at = -1
        self.breaks_with: BaseException = KeyboardInterrupt()
        self._waiting: deque[Any] = deque()

    def submit(self, job: Any) -> None:
        if self.breaks_at == 0:
            raise self.breaks_with
        self.breaks_at -= 1
        self._waiting.append(job)
        job.future.exception = functools.partial(self._wait, job, job.future.exception)

    def help(self, futures: Collection[Future[None]]) -> None:
        """No device helps."""

    @property
    def names(self) -> list[str]:
        """The buckets whose updates wait."""
        return [job.update.bucket.layout.name for job in self._waiting]

    def finish(self) -> None:
        """Make all that wait, as threads do sooner or later."""
        while self._waiting:
            self._make(self._waiting.popleft())

    def _wait(self, job: Any, error: Any) -> BaseException | None:
        if not job.future.done():
            self.waited.append(job.update.bucket.layout.name)
        while not job.future.done():  # those before it too, as a thread would
            self._make(self._waiting.popleft())
        return error()

    def _make(self, job: Any) -> None:
        name = job.update.bucket.layout.name

        def work() -> None:
            if name == self.fails:
                raise ArithmeticError("out of numbers")
            job.update()
            self.ran.append(name)

        with traced(None):  # a thread, which no Ctrl-C reaches
            job.run("host", work, mock.Mock())


def late(model: Any) -> Late:
    """Let the updates of a megacompiled model be late from now on."""
    workers = Late()
    inside.update_by(model, workers)
    return workers


class AtCall:
    """Raises `error` where a function of ours is called for the n-th time."""

    def __init__(self, name: str, left: int, error: BaseException) -> None:
        self.name, self.left, self.error = name, left, error

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "call" and frame.f_code.co_name == self.name and is_ours(frame):
            self.left -= 1
            if self.left == 0:
                raise self.error
        return None


class Fails(torch.autograd.Function):
    """Gives its input, and raises a KeyError in the backward when it is told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Fails.armed:
            raise KeyError("out of luck")
        return gradients[0]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def may_fail(x: Tensor) -> Tensor:
    """A break of the captured graph, whose backward fails within `failing`."""
    return Fails.apply(x)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """For its duration a backward through `may_fail` raises."""
    Fails.armed = True
    try:
        with pytest.raises(KeyError, match="out of luck"):
            yield
    finally:
        Fails.armed = False


class Wrapper(Optimizer):
    """Shares groups with the optimizer inside. `hooks` is what its hooks of `step()` are kept in:
    plain dicts in pytorch_optimizer, ordered ones in timm."""

    hooks: Callable[[], Any] = OrderedDict

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks = self.hooks()
        self._optimizer_step_post_hooks = self.hooks()
        self.inner = inner
        self.defaults = inner.defaults
        self.own: Any = defaultdict(dict)  # the wrapper's states, by parameter
        self.count = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that have a gradient."""
        found = [p for group in self.param_groups for p in group["params"]]
        return [p for p in found if p.grad is not None]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        own = [dict(self.own[p]) for g in self.param_groups for p in g["params"]]
        return {"own": own, "count": self.count, "inner": self.inner.state_dict()}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        self.own.update(zip(params, copy.deepcopy(state_dict["own"]), strict=True))
        self.count = state_dict["count"]
        self.inner.load_state_dict(state_dict["inner"])
        self.__setstate__({})  # torch's own would: it sets some of the hooks up


class Lookahead(Wrapper):
    """Every second step draws parameters to slow ones."""

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p in self.params:
                slow = self.own[p].setdefault("slow", p.data.clone())
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss


class ScheduleFree(Wrapper):
    """Steps on `z`, which changes places with the parameter around the step."""

    hooks = dict

    @staticmethod
    def swap(x: Tensor, y: Tensor) -> None:
        """Exchange the bits of two tensors in place."""
        for a, b in ((x, y), (y, x), (x, y)):
            a.view(torch.uint8).bitwise_xor_(b.view(torch.uint8))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self.params
        for p in params:
            z = self.own[p].setdefault("z", p.clone())
            p.lerp_(z, weight=-0.1)
            self.swap(z, p)
        self.inner.step()
        for p in params:
            z = self.own[p]["z"]
            self.swap(z, p)
            p.lerp_(z, weight=0.3)
        return loss
