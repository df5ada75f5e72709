"""Other names for a gradient's or a parameter's memory, used behind `optimizer.step()`.

A guard cannot see an alias. The update in flight must be over before one is used, so the step waits
where there is one, and an export to another library waits like any other use.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests import inside
from tests.training import BUCKET, NAME, adamw, gradients, net, train
from tests.zoo import assert_same, equal, twins

LIBRARY: Any = torch  # its stubs do not know all of these


class Late:
    """In the place of the threads that make updates: one is made when somebody waits for it, and
    with it those before it; `waited` are the buckets of these."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self._jobs: deque[Any] = deque()

    def submit(self, job: Any) -> None:
        self._jobs.append(job)
        job.future.exception = functools.partial(self._wait, job, job.future.exception)

    def help(self, futures: object) -> None:
        """No device helps."""

    def finish(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            job.run("host", job.update)

    def _wait(self, job: Any, error: Callable[[], Any]) -> Any:
        if not job.future.done():
            self.waited.append(job.update.bucket.layout.name)
        while not job.future.done():
            earlier = self._jobs.popleft()
            earlier.run("host", earlier.update)
        return error()


class Flying:
    """A plain model and a streamed one, whose updates are made when somebody waits for them."""

    def __init__(self) -> None:
        self.plain, self.model = twins(net())
        self.both: list[tuple[Any, Optimizer]] = [
            (model, adamw(model)[0]) for model in (self.plain, self.model)
        ]
        for model, optimizer in self.both:
            train(model, [optimizer], 2)
        self.late = Late()
        inside.machine(self.model).host_updates.workers = self.late  # type: ignore[assignment]

    def step(self, before: Callable[[Any], Any] = lambda model: None) -> list[Any]:
        """Another one; gives what `before` gives, of each model."""
        found = []
        for model, optimizer in self.both:
            optimizer.zero_grad()
            gradients(model, 2)
            self.late.finish()
            self.late.waited.clear()
            found.append(before(model))
            optimizer.step()
        return found


def flattened(model: nn.Module) -> Tensor:
    """All gradients as one flat tensor, of which each `p.grad` is a view."""
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
    offset = 0
    for param in params:
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    return flat


GRADIENTS: dict[str, Callable[[Any], Tensor]] = {
    "flat gradients": flattened,
    "p.grad.view(-1)": lambda m: m.get_parameter(NAME).grad.view(-1),
    "p.grad.detach()": lambda m: m.get_parameter(NAME).grad.detach(),
    "p.grad.data": lambda m: m.get_parameter(NAME).grad.data,
    "numpy": lambda m: torch.from_numpy(m.get_parameter(NAME).grad.numpy()),
}


def own(model: Any) -> Tensor:
    """What the user has put into `p.grad` is guarded itself."""
    param = model.get_parameter(NAME)
    param.grad = torch.full_like(param, 0.5)
    found: Tensor = param.grad
    return found


def test_an_alias_of_a_gradient_is_written_behind_the_step() -> None:
    both = Flying()
    for name, alias in GRADIENTS.items():
        aliases = both.step(alias)
        assert BUCKET in both.late.waited, name
        for each in aliases:
            each.zero_()
        del each, aliases
        assert_same(both.plain, both.model)
    both.step()
    assert both.late.waited == [], "nobody else has a gradient"
    gradients_of_the_user = both.step(own)
    assert both.late.waited == []
    for each in gradients_of_the_user:
        each.zero_()
    assert both.late.waited == [BUCKET]
    assert_same(both.plain, both.model)


EXPORTS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "to_dlpack": lambda p: LIBRARY.from_dlpack(LIBRARY.utils.dlpack.to_dlpack(p)),
    "torch.to_dlpack": lambda p: LIBRARY.from_dlpack(LIBRARY.to_dlpack(p)),
    "_to_dlpack_versioned": lambda p: LIBRARY.from_dlpack(LIBRARY._C._to_dlpack_versioned(p)),
    "from_dlpack": lambda p: LIBRARY.from_dlpack(p.detach()),
    "__dlpack__": lambda p: LIBRARY.from_dlpack(p.detach().__dlpack__()),
    "np.from_dlpack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())),
    "np.asarray": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "data_ptr": lambda p: (p.data_ptr(), p)[1],
    "untyped_storage": lambda p: torch.empty(0).set_(p.untyped_storage()).view(p.shape),
}


def test_an_export_waits_and_is_an_alias() -> None:
    both = Flying()
    attribute = "__dlpack_c_exchange_api__"  # libraries that find it read memory without a call
    for name, export in EXPORTS.items():
        both.step()
        plain, param = (model.get_parameter(NAME) for model, _ in both.both)
        assert not hasattr(type(param), attribute) and both.late.waited == []
        found = export(param)
        assert both.late.waited == [BUCKET], name
        assert equal(found.detach(), plain.detach()), name
        del found
    assert hasattr(type(param), attribute) == hasattr(Tensor, attribute)
    capsule = LIBRARY.utils.dlpack.to_dlpack(param.detach())
    both.step()
    assert BUCKET in both.late.waited
    del capsule
    assert_same(both.plain, both.model)
