"""Every update kernel against its twin in plain torch, which test_rules.py holds to torch.optim.

And the kernel of a head's rows, against the gradient that autograd finds of the same sum. On CUDA
the kernels are compiled, and all of this file is marked `gpu`; elsewhere Triton's interpreter runs
them on host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim import rule as table
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, launches
from megacompile.runtime.optim.rules import RULES
from megacompile.runtime.optim.twin import apply, seed_of
from tests.processes import python

pytest.importorskip("triton")

ADAM, SGD, _ = RULES

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK = 1024 if ON_GPU else 2**16  # the interpreter's cost is a program's, not an element's
SIZES = (1, 255, 256, 257, 4099, 4096)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EIGHT_BIT = torch.uint8
Run = Callable[[OptimizerRule, Sequence[Update]], None]

pytestmark = [pytest.mark.gpu] if ON_GPU else []
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)

# The options of every rule.
GROUP = AdamW([nn.Parameter(torch.zeros(1))], 1e-2, (0.9, 0.99), weight_decay=0.1).param_groups[0]
GROUP |= {"momentum": 0.9, "dampening": 0.1, "nesterov": False}
PLAIN = {**GROUP, "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}  # of SGD


def kernel(rule: OptimizerRule, updates: Sequence[Update], block: int = BLOCK) -> None:
    from megacompile.runtime.optim.kernels import run

    device = updates[0].grad.device
    run(rule, launches(rule, updates, block=block), device, block=block)


def twin(rule: OptimizerRule, updates: Sequence[Update]) -> None:
    for update in updates:
        apply(rule, update)


def some_updates(
    rule: OptimizerRule,
    sizes: Sequence[int] = SIZES,
    *,
    param: torch.dtype = FP32,
    grad: torch.dtype | None = None,
    state: torch.dtype | None = FP32,
    copy: torch.dtype | None = None,
    **options: object,
) -> list[Update]:
    """Parameters of a bucket with new states."""
    options = {**GROUP, **options}
    torch.manual_seed(0)
    updates = []
    for numel in sizes:
        states: list[State | None] = [None] * len(rule.moments)
        for i, moment in enumerate(rule.moments):
            if state is not None and (moment.option is None or options.get(moment.option)):
                zeros = torch.zeros(numel, device=DEVICE)
                eight = state == EIGHT_BIT
                states[i] = blockwise.quantize(zeros, moment.signed) if eight else zeros.to(state)
        given = torch.randn(numel, device=DEVICE).to(param)
        gradient = torch.empty(numel, dtype=grad or param, device=DEVICE)
        other = None if copy is None else torch.zeros(numel, dtype=copy, device=DEVICE)
        updates.append(Update(given, gradient, tuple(states), (), copy=other))
    return updates


def cloned(update: Update) -> Update:
    return update.map(lambda _, tensor: tensor.clone())


def at_step(
    rule: OptimizerRule, updates: Sequence[Update], step: int, *, seeded: bool = False
) -> list[Update]:
    """The updates with new gradients and each with scalars of its own."""
    found = []
    for i, update in enumerate(updates):
        group = {**GROUP, "lr": 1e-2 * (i + 1), "decoupled_weight_decay": i % 2 == 0}
        group |= {"maximize": i % 3 == 1, "nesterov": i % 2 == 1}
        hyper = rule.hyper(group, step=step + i, first=step == 1, scale=0.5)
        update.grad.copy_(torch.randn(update.grad.numel(), device=DEVICE))
        seed = seed_of(7, i, step) if seeded else None
        found.append(update._replace(hyper=hyper, seed=seed))
    return found


def steps_of(
    run: Run, rule: OptimizerRule, updates: Sequence[Update], *, seeded: bool = False, steps: int
) -> list[Update]:
    found = [cloned(u) for u in updates]
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        run(rule, at_step(rule, found, step, seeded=seeded))
    return found


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    """fp64 to 1e-12 and fp32 to 1e-6 of the largest value, 16-bit floats to one ulp of it."""
    assert got.dtype == want.dtype, what
    tolerance = {FP64: 1e-12, FP32: 1e-6, BF16: 2.0**-8, FP16: 2.0**-11}[got.dtype]
    worst = (got.double() - want.double()).abs().max()
    assert worst <= tolerance * want.double().abs().max(), f"{what}: {worst}"
    if got.dtype in (BF16, FP16):  # a few may round to the other side
        assert ((got != want).double().mean()) <= max(1e-3, 1.5 / got.numel()), what


def assert_same(rule: OptimizerRule, got: Sequence[Update], want: Sequence[Update]) -> None:
    for one, other in zip(got, want, strict=True):
        what = f"{rule.name} of {one.param.numel()}"
        for name in ("param", "out", "copy"):
            mine, its = getattr(one, name), getattr(other, name)
            if mine is not None:
                assert_close(mine, its, f"{what}: {name}")
        for i, (state, its_state) in enumerate(zip(one.states, other.states, strict=True)):
            if isinstance(state, tuple):
                assert isinstance(its_state, tuple)
                assert_close(state[1], its_state[1], f"{what}: absmax {i}")
                distance = (state[0].int() - its_state[0].int()).abs()
                assert distance.max() <= 1, f"{what}: codes {i}"
                most = max(1e-4, 1.5 / distance.numel())  # at a tie of rounding
                assert (distance > 0).double().mean() <= most, f"{what}: codes {i}"
            elif state is not None:
                assert isinstance(its_state, Tensor)
                assert_close(state, its_state, f"{what}: state {i}")


def check(
    rule: OptimizerRule, updates: Sequence[Update], *, seeded: bool = False, steps: int = 2
) -> list[Update]:
    """Kernel and twin agree; gives what the kernel made."""
    got = steps_of(kernel, rule, updates, seeded=seeded, steps=steps)
    assert_same(rule, got, steps_of(twin, rule, updates, seeded=seeded, steps=steps))
    return got


STATES, PARAMS = (FP32, BF16, EIGHT_BIT), (BF16, FP16, FP32)
SQUARE = [  # each pair of rule, state and parameter
    (rule, STATES[i], PARAMS[(i + k) % 3]) for k, rule in enumerate(RULES) for i in range(3)
]


@pytest.mark.parametrize(
    ("rule", "state", "param"), SQUARE, ids=[f"{r.name}-{s}-{p}" for r, s, p in SQUARE]
)
def test_every_dtype(rule: OptimizerRule, param: torch.dtype, state: torch.dtype) -> None:
    check(rule, some_updates(rule, param=param, state=state))


def test_amsgrad_no_momentum_and_float64() -> None:
    for state in STATES:
        check(ADAM, some_updates(ADAM, SIZES[3:], state=state, amsgrad=True))
    check(SGD, some_updates(SGD, SIZES[3:], state=None))
    for rule in RULES:
        check(rule, some_updates(rule, SIZES[3:], param=FP64, state=FP64))


@EACH_RULE
def test_a_master_and_its_copy_and_the_new_parameter_elsewhere(rule: OptimizerRule) -> None:
    updates = some_updates(rule, grad=BF16, copy=BF16)
    in_place = check(rule, updates)
    for update in in_place:
        assert update.copy is not None
        assert torch.equal(update.copy, update.param.to(BF16))
    one_step = steps_of(kernel, rule, updates, steps=1)
    updates = [update._replace(out=torch.zeros_like(update.param)) for update in updates]
    apart = check(rule, updates, steps=1)
    for before, after, other in zip(updates, apart, one_step, strict=True):
        assert torch.equal(before.param, after.param)
        assert after.out is not None and torch.equal(after.out, other.param)


def test_a_bucket_of_several_signatures() -> None:
    """Parameters of different dtypes share no launch; an empty one takes part in none."""
    mixed = [
        *some_updates(ADAM, [300, 0, 512], param=BF16, state=EIGHT_BIT),
        *some_updates(ADAM, [77, 1024], param=FP32, state=FP32, copy=BF16),
        *some_updates(ADAM, [500], param=BF16, state=BF16),
    ]
    check(ADAM, [u for u in mixed if u.param.numel()])
    kernel(ADAM, at_step(ADAM, mixed, 1))


def test_many_programs_for_a_parameter() -> None:
    """With the block of the GPU: several rows, blocks and a short last one; rounded at random."""
    updates = some_updates(ADAM, [5000, 3, 2048, 4097], param=BF16, state=EIGHT_BIT)
    got = steps_of(lambda rule, u: kernel(rule, u, 1024), ADAM, updates, seeded=True, steps=2)
    assert_same(ADAM, got, steps_of(twin, ADAM, updates, seeded=True, steps=2))


def test_neighbouring_memory_stays() -> None:
    """Nothing is written beyond a parameter's end, aligned or not."""
    for numel, dtype in itertools.product((4096, 4099), (FP32, BF16)):
        buffer = torch.full((numel + 4096,), 7.0, dtype=dtype, device=DEVICE)
        moments = [torch.full((numel + 4096,), 7.0, device=DEVICE) for _ in range(2)]
        views = [m[:numel].zero_() for m in moments]
        grad = torch.ones(numel, dtype=dtype, device=DEVICE)
        kernel(ADAM, [Update(buffer[:numel], grad, (*views, None), ADAM.hyper(GROUP))])
        assert (buffer[:numel] != 7).all()
        assert all((tensor[numel:] == 7).all() for tensor in (buffer, *moments))


def test_8_bit_states_of_extreme_gradients() -> None:
    """Blocks of very small numbers, of those that are not finite, and a short one."""
    (update,) = some_updates(ADAM, [256 * 6 + 7], state=EIGHT_BIT)
    update.grad.copy_(torch.randn(len(update.grad), device=DEVICE))
    update.grad[:256].neg_().sub_(5)
    update.grad[256:512] *= 1e-14
    update.grad[512:768] *= 1e-30
    update.grad[768], update.grad[1024], update.grad[1280] = torch.inf, torch.nan, -torch.inf
    twins = [cloned(update)]
    for run, updates in ((kernel, [update]), (twin, twins)):
        run(ADAM, [u._replace(hyper=ADAM.hyper(GROUP)) for u in updates])
    for i, (stored, its) in enumerate(zip(update.states[:2], twins[0].states[:2], strict=True)):
        assert isinstance(stored, tuple) and isinstance(its, tuple)
        codes, absmax = blockwise.quantize(blockwise.dequantize(*stored, i == 0), i == 0)
        assert torch.equal(codes, stored[0])
        assert torch.allclose(absmax, stored[1], rtol=0.0, atol=0.0, equal_nan=True)
        assert stored[1].isnan().tolist() == [False] * 3 + [True] * 3 + [False]
        assert (stored[1] == 0).tolist() == [False, False, i == 1] + [False] * 4
        assert torch.allclose(stored[1], its[1], rtol=1e-5, atol=0.0, equal_nan=True)
    assert (~update.param.isfinite()).nonzero().flatten().tolist() == [768, 1024, 1280]


def test_weight_decay_of_0_leaves_an_infinite_parameter() -> None:
    """As in torch.optim: 0 * inf is not added to the gradient."""
    for rule, run in itertools.product((ADAM, SGD), (kernel, twin)):
        group = {**GROUP, "weight_decay": 0.0, "decoupled_weight_decay": False}
        (update,) = some_updates(rule, [16])
        update.grad.zero_()
        update.param[3] = -torch.inf
        run(rule, [update._replace(hyper=rule.hyper(group, first=True))])
        assert update.param[3] == -torch.inf


@pytest.mark.parametrize("momentum", [False, True])
def test_stochastic_rounding_is_bit_identical(momentum: bool) -> None:
    """Where the arithmetic is exact: g = 2^-k, lr a power of two, no decay, no moments."""
    numel = 3000
    param = torch.randn(numel, device=DEVICE).to(BF16)
    grad = (2.0 ** torch.randint(-12, -6, (numel,), device=DEVICE)).to(BF16)
    found = [param.clone() for _ in range(2)]
    for run, p in zip((kernel, twin), found, strict=True):
        for step in (1, 2):
            state = torch.zeros(numel, device=DEVICE) if momentum else None
            hyper = SGD.hyper({**PLAIN, "nesterov": momentum}, first=True)
            seed = seed_of(3, 0, step)
            run(SGD, [Update(p, grad, (state,), hyper, seed=seed)])
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert not torch.equal(found[0], param)


def test_stochastic_rounding_keeps_what_is_not_finite() -> None:
    values = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    values = values.to(DEVICE)
    for run in (kernel, twin):
        param = values.to(BF16)
        hyper = SGD.hyper({**PLAIN, "lr": 0.0}, first=True)
        run(SGD, [Update(param, torch.ones_like(values), (None,), hyper, seed=5)])
        torch.testing.assert_close(param.float(), values, rtol=0, atol=0, equal_nan=True)


def test_a_step_that_is_like_the_one_before_keeps_what_it_knows_of_memory() -> None:
    """The gradients and the scalars are new; of several signatures."""
    from megacompile.runtime.optim.kernels import run

    made = [*some_updates(ADAM, (48, 16, 32)), *some_updates(ADAM, (5, 7), param=BF16)]
    rows = {k: table.describe(ADAM, u) for k, u in enumerate(at_step(ADAM, made, 1))}
    both = [u._replace(grad=torch.rand_like(u.param)) for u in at_step(ADAM, made, 2)]
    wants = [cloned(update) for update in both]
    twin(ADAM, wants)
    grads, hypers = [u.grad.data_ptr() for u in both], [tuple(u.hyper) for u in both]
    tables = table.tables_of(rows)
    assert len(tables) > 1
    for each in tables:
        each.renew(grads)
    run(ADAM, [each.launch(hypers, block=1024, device=DEVICE) for each in tables], DEVICE)
    assert_same(ADAM, both, wants)


def compile_for_a_gpu() -> None:
    """Let Triton's compiler, which must not be interpreting, make every rule's kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megacompile.runtime.optim.kernels import _update, constants

    for rule in RULES:
        least = tuple(None if moment.option else FP64 for moment in rule.moments)
        most = (EIGHT_BIT,) * len(rule.moments)
        kinds = [(BF16, most, None), (FP64, least, FP32)]
        for dtype, states, copy in kinds if rule is ADAM else kinds[:1]:
            signature = table.Signature(dtype, dtype, copy, states, stochastic=True, aligned=True)
            given = constants(rule, signature) | {"ROWS": 4, "HYPERS": len(rule.hyper(GROUP))}
            hyper = "*fp64" if dtype == FP64 else "*fp32"
            types = {"blocks": "*i32", "table": "*i64", "hyper": hyper, "maps": "*fp32"}
            types |= dict.fromkeys(given, "constexpr")
            source = ASTSource(_update, types, given)
            made = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 8})
            assert "ptx" in made.asm


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """What Triton's interpreter takes its compiler may refuse: in a process that compiles."""
    program = "from tests.unit import test_kernels; test_kernels.compile_for_a_gpu()"
    python("-c", program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    numel = 2**31 + 300
    param = torch.ones(numel, dtype=BF16, device=DEVICE)
    grad = torch.ones(numel, dtype=BF16, device=DEVICE)
    group = {**PLAIN, "lr": 0.5}
    kernel(SGD, [Update(param, grad, (None,), SGD.hyper(group, first=True))])
    assert (param[-1000:] == 0.5).all() and (param[:1000] == 0.5).all()
    assert bool((param == 0.5).all())


@pytest.mark.gpu
def test_tables_in_flight_are_not_overwritten() -> None:
    """Calls ahead of a busy device each keep their own staged scalars."""
    updates = some_updates(SGD, [4096], state=None)
    updates[0].param.zero_()
    updates[0].grad.fill_(1.0)
    kernel(SGD, [updates[0]._replace(hyper=(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0))])
    torch.cuda._sleep(100_000_000)
    for i in range(100):
        kernel(SGD, [updates[0]._replace(hyper=(1.0, 0.0, float(i), 0.0, 1.0, 1.0, 0.0))])
    assert (updates[0].param == sum(range(100))).all()


def some_rows(
    count: int, classes: int, dtype: torch.dtype = FP32, *, weighted: bool = False
) -> Any:
    """Rows of which every third is ignored."""
    g = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(count, classes, generator=g)).to(dtype)
    valid = torch.arange(count) % 3 != 1
    target = torch.where(valid, torch.randint(0, classes, (count,), generator=g), 0)
    weight = torch.rand(classes, generator=g).to(DEVICE) if weighted else None
    return SimpleNamespace(
        logits=logits.to(DEVICE),
        target=target.to(DEVICE),
        valid=valid.to(DEVICE),
        class_weight=weight,
        weight_sum=float(classes) if weight is None else weight.sum(),
    )


def check_rows(of: Any, label_smoothing: float = 0.0, *, block: int = 256) -> None:
    """Logarithms of sums, weighted sums and gradients; without a gradient the logits stay."""
    from megacompile.runtime.ops.cross_entropy_kernel import normalize_rows

    smooth, before = label_smoothing != 0, of.logits.clone()
    weight = torch.ones(before.shape[1], device=DEVICE)
    weight = weight if of.class_weight is None else of.class_weight
    a = weight[of.target] * of.valid * (1 - label_smoothing)
    b = of.valid * (label_smoothing / before.shape[1])
    z = before.float().requires_grad_()
    lse = z.logsumexp(1)
    loss = a * (lse - z.gather(1, of.target[:, None])[:, 0])
    weighted = (z * weight).sum(1) if smooth else None
    if weighted is not None:
        loss = loss + b * (of.weight_sum * lse - weighted)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    for with_gradient in (False, True):
        mine, sums = normalize_rows(of, a, b, smooth=smooth, gradient=with_gradient, block=block)
        torch.testing.assert_close(mine, lse.detach(), rtol=1e-6, atol=1e-6)
        assert (sums is None) == (weighted is None)
        if sums is not None and weighted is not None:  # in another order: by what is added
            of_terms = (z * weight).abs().sum(1)
            torch.testing.assert_close(
                sums / of_terms, (weighted / of_terms).detach(), rtol=0.0, atol=1e-6
            )
        assert with_gradient or torch.equal(of.logits, before)
    # in the logits' dtype: a unit in the last place
    eps = torch.finfo(before.dtype).eps
    wanted = gradient.to(before.dtype)
    torch.testing.assert_close(of.logits, wanted, rtol=2 * eps, atol=1e-6)
    assert of.logits.isfinite().all()


@pytest.mark.parametrize(
    ("classes", "dtype", "weighted", "label_smoothing"),
    list(AllPairs([[1, 255, 256, 257, 1000], [FP32, BF16, FP16], [True, False], [0.0, 0.1]])),
)
def test_rows_of_a_head_and_autograd(
    classes: int, dtype: torch.dtype, weighted: bool, label_smoothing: float
) -> None:
    """Smoothing over weighted classes is left to torch."""
    weighted = weighted and not label_smoothing
    check_rows(some_rows(5, classes, dtype, weighted=weighted), label_smoothing)


def test_blocks_of_infinite_logits_and_those_far_from_zero() -> None:
    """Masked classes at the start, at the end, and a whole block of them."""
    of = some_rows(4, 1000)
    of.logits[:, :600] = float("-inf")
    of.logits[:, 900:] = float("-inf")
    of.target.fill_(700)
    check_rows(of)
    of = some_rows(4, 600)
    of.logits.add_(1e4)
    check_rows(of)


@pytest.mark.gpu
def test_the_classes_of_a_large_model() -> None:
    check_rows(some_rows(300, 152064, BF16), 0.1, block=8192)
