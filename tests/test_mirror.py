"""Places of masters, gradients and states: what is planned is what is laid out."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megacompile.cost.places import flat_bytes
from megacompile.ir.buckets import ALIGNMENT_BYTES, PADDED_NUMEL
from megacompile.ir.mirror import mirrored
from megacompile.runtime.params.bucket import HostBucket
from tests.layouts import layout_of, odd_tensors

SIZES = (1, 5, 63, 64, 255, 256, 300, 1025)


def test_neighbours_are_as_far_apart_as_the_parameters() -> None:
    bucket = layout_of([torch.empty(n) for n in (5, 300, 7, 9)])
    offsets, end = mirrored(bucket, {3: 2, 1: 2, 0: 2})
    assert offsets == {0: 0, 1: bucket.params[1].offset_bytes // 2, 3: offsets[1] + 2 * 512}
    assert end == offsets[3] + 2 * 9
    assert PADDED_NUMEL == 256, "which 300 elements are rounded up to a multiple of"


def test_mixed_sizes_lie_one_after_the_other() -> None:
    bucket = layout_of([torch.empty(5), torch.empty(300), torch.empty(7)])
    assert mirrored(bucket, {0: 4, 1: 2, 2: 4}) == ({0: 0, 1: 256, 2: 256 + 768}, 1024 + 28)
    assert mirrored(bucket, {}) == ({}, 0)
    assert mirrored(bucket, {0: 0, 2: 0})[1] == 0, "gradients that are used up at once"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_overlaps_and_plans_count_what_buckets_take(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choice([(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)])
    tensors = [
        torch.randn(rng.choice(SIZES)).to(rng.choice(kinds)) for _ in range(rng.randint(1, 6))
    ]
    layout = layout_of(tensors)
    params = [nn.Parameter(tensor) for tensor in tensors]
    bucket = HostBucket(layout, params, pin=False)
    chosen = [i for i in range(len(params)) if rng.random() < 0.7]
    rng.shuffle(chosen)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    made = bucket.states_like(dict.fromkeys(chosen, dtype), pin=False)
    assert made.whole.numel() == flat_bytes(layout, chosen, lambda _: float(dtype.itemsize))
    last, start = 0, made.whole.data_ptr() if chosen else 0
    for i in sorted(chosen):
        at = made.tensors[i].data_ptr() - start
        assert at >= last and at % dtype.itemsize == 0
        last = at + made.tensors[i].nbytes
    assert last == made.whole.numel()


def test_what_is_odd() -> None:
    layout = layout_of(odd_tensors())
    offsets, end = mirrored(layout, {i: p.dtype.itemsize for i, p in enumerate(layout.params)})
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets.values())
    assert end == offsets[5] + 9
