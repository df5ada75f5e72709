"""`optimizer.step()` over streamed parameters, against the stock optimizer in the same run."""

from __future__ import annotations

import copy
import unittest.mock
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import RMSprop

from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.optim.update import Update
from megacompile.runtime.params import optimizer_states
from megacompile.runtime.step import step
from megacompile.runtime.updates.compiled import Compiled
from megacompile.runtime.updates.update import UpdatePath
from tests.inside import buckets, ways
from tests.training import (
    OPTIMIZERS,
    STEPS,
    Make,
    adamw,
    assert_states_same,
    groups,
    net,
    schedulers,
    sgd,
    train,
)
from tests.zoo import assert_same, twins


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_ten_steps_are_bitwise_the_stock_ones(case: str) -> None:
    plain, streamed = twins(net())
    optimizers = [OPTIMIZERS[case](model) for model in (plain, streamed)]
    found = [
        train(model, of, of=schedulers(of))
        for model, of in zip((plain, streamed), optimizers, strict=True)
    ]
    assert_states_same(found[0], found[1])
    assert_same(plain, streamed)
    for mine, theirs in zip(*optimizers, strict=True):
        assert_states_same(mine.state_dict(), theirs.state_dict())
    assert ways(streamed) == {UpdatePath.STOCK}
    assert streamed.layers[0].norm.weight.grad is None
    assert streamed.spare.weight.grad is None


def test_an_optimizer_without_an_update_of_ours_is_stock_and_said_once() -> None:
    plain, streamed = twins(net())
    mine, theirs = (RMSprop(groups(model), lr=1e-3) for model in (plain, streamed))
    train(plain, [mine])
    with pytest.warns(UserWarning, match="RMSprop keeps torch.optim's path on the host") as said:
        train(streamed, [theirs], 1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(streamed, [theirs], STEPS - 1, start=1)
    assert_same(plain, streamed)
    assert ways(streamed) == set()


@pytest.mark.parametrize("make", [adamw, lambda m: sgd(m, momentum=0.9)], ids=["adamw", "sgd"])
def test_inductor_is_within_rounding(make: Make) -> None:
    plain, streamed = twins(net(), lowering="inductor", progress=False)
    mine, theirs = make(plain), make(streamed)
    norms = [
        train(model, of, of=schedulers(of)) for model, of in ((plain, mine), (streamed, theirs))
    ]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()
        assert (got.grad is None) == (want.grad is None)


def test_a_state_is_a_view_of_the_buckets_flat_one() -> None:
    plain, streamed = twins(net())
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        train(model, [optimizer], 2)
    for want, param in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert list(mine.state.get(want, {})) == list(theirs.state.get(param, {}))
    seen = 0
    for bucket in buckets(streamed).values():
        for i, param in enumerate(bucket.params):
            for name in ("exp_avg", "exp_avg_sq") if param in theirs.state else ():
                state, buffer = theirs.state[param][name], bucket.states.of(theirs)[name][i]
                assert isinstance(buffer, Tensor)
                assert state.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                assert (state.shape, state.stride()) == (param.shape, param.stride())
                seen += 1
    assert seen == 2 * sum(p.grad is not None for p in plain.parameters())


def compile_now(rule: Compiled, update: Update) -> None:
    if not rule.ready(update):
        rule.wait()
        assert rule.ready(update)


def test_states_of_the_first_step_are_never_all_there_twice() -> None:
    """torch.optim makes them, and they move to the buckets: their own memory is free then."""
    _, streamed = twins(net())
    made: list[tuple[weakref.ref[Tensor], int]] = []

    def adopt(optimizer: Any, bucket: Any, i: int, state: dict[str, Any], names: Any) -> None:
        for reference, at in made:
            before = reference()
            assert before is None or before.data_ptr() != at, "that of a parameter before"
        made.extend((weakref.ref(state[name]), state[name].data_ptr()) for name in names)
        optimizer_states.adopt(optimizer, bucket, i, state, names)

    with unittest.mock.patch.object(step, "adopt", adopt):
        train(streamed, adamw(streamed), 1)
    assert len(made) > 10


def test_a_rule_in_the_background_is_out_of_the_compilers_hands() -> None:
    """Dynamo, while it compiles, changes and restores the random state of the whole process, and a
    reset frees what another thread runs: so the code runs without it."""
    rule = Compiled(ADAM)
    wants: dict[torch.dtype, Tensor] = {}
    updates = {}
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.rand(64, generator=generator).to(dtype) for _ in range(4)]
        group = torch.optim.AdamW([nn.Parameter(tensors[0])]).param_groups[0]
        states = (tensors[2], tensors[3], None)
        updates[dtype] = Update(tensors[0], tensors[1], states, ADAM.hyper(group))
        wanted = copy.deepcopy(updates[dtype])
        apply(ADAM, wanted)
        wants[dtype] = wanted.param
        compile_now(rule, updates[dtype])
    other = Compiled(ADAM)  # finds both in Dynamo's cache, the older one behind
    compile_now(other, updates[torch.float32])
    for made, dtype in ((other, torch.float32), (rule, torch.bfloat16)):
        before = torch.get_rng_state()
        torch.compiler.reset()
        with unittest.mock.patch.object(torch, "compile", side_effect=AssertionError):
            made(updates[dtype])
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(updates[dtype].param, wants[dtype], rtol=1e-6, atol=1e-6)
