"""DeviceSlots (runtime/device/slots.py): buffers that grow, and buckets as views of them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megacompile.ir.buckets import Bucket, Slot
from megacompile.runtime.device.slots import DeviceSlots
from tests.layouts import layout_of, odd_tensors

CPU = torch.device("cpu")


def fill(slots: DeviceSlots, slot: Slot, layout: Bucket, values: Sequence[Tensor]) -> None:
    """What a prefetch does, through the flat part of the slot."""
    flat = slots.flat(slot, layout)
    for place, value in zip(layout.params, values, strict=True):
        if place.numel:
            part = flat[place.offset_bytes : place.offset_bytes + place.size_bytes]
            part.view(place.dtype).as_strided(place.shape, place.stride).copy_(value)


def slots_of(*sizes: int) -> DeviceSlots:
    made = DeviceSlots(CPU)
    made.require([Slot(i, size) for i, size in enumerate(sizes)])
    return made


# --- growth


def test_buffers_have_the_size_that_is_asked_for() -> None:
    slots = slots_of(100, 300)
    assert [buffer.numel() for buffer in slots.buffers] == [100, 300]
    assert [buffer.dtype for buffer in slots.buffers] == [torch.uint8] * 2


def test_smaller_and_fewer_slots_leave_the_buffers() -> None:
    slots = slots_of(100, 300)
    before = list(slots.buffers)
    generation = slots.generation
    slots.require([Slot(0, 50)])
    slots.require([Slot(0, 100), Slot(1, 300)])
    slots.require([])
    assert all(now is then for now, then in zip(slots.buffers, before, strict=True))
    assert slots.generation == generation, "nothing was lost"


def test_only_what_is_too_small_grows() -> None:
    slots = slots_of(100, 300)
    first, second = slots.buffers
    generation = slots.generation
    slots.require([Slot(0, 200), Slot(1, 200), Slot(2, 200)])
    assert [buffer.numel() for buffer in slots.buffers] == [200, 300, 200]
    assert slots.buffers[0] is not first and slots.buffers[1] is second
    assert slots.generation > generation, "a backward must not take what was in the old buffer"


def test_a_buffer_that_was_replaced_is_given_back() -> None:
    layout = layout_of([torch.ones(8)])
    slots = slots_of(layout.size_bytes)
    old = weakref.ref(slots.buffers[0])
    slots.weights(Slot(0, layout.size_bytes), layout)
    slots.require([Slot(0, 10_000)])
    assert old() is None


def test_slots_are_numbered_from_zero() -> None:
    with pytest.raises(AssertionError, match="numbered from 0"):
        DeviceSlots(CPU).require([Slot(1, 8)])


def test_buffers_can_be_written_outside_of_the_inference_mode_they_were_made_in() -> None:
    with torch.inference_mode():
        slots = slots_of(64)
    assert not slots.buffers[0].is_inference()
    slots.buffers[0].requires_grad_(False).add_(1)


# --- views


def test_weights_are_views_with_the_values_of_the_bucket() -> None:
    values = odd_tensors()
    layout = layout_of(values)
    slots = slots_of(16, layout.size_bytes + 1000)
    slot = Slot(1, layout.size_bytes)
    assert slots.flat(slot, layout).numel() == layout.size_bytes
    assert slots.flat(slot, layout).data_ptr() == slots.buffers[1].data_ptr()
    fill(slots, slot, layout, values)
    for place, weight, value in zip(
        layout.params, slots.weights(slot, layout), values, strict=True
    ):
        assert torch.equal(weight, value)
        assert (weight.dtype, weight.stride()) == (place.dtype, place.stride)
        if place.numel:
            assert weight.data_ptr() == slots.buffers[1].data_ptr() + place.offset_bytes


def test_views_show_what_is_in_the_slot_now() -> None:
    values = odd_tensors()
    layout = layout_of(values)
    slots = slots_of(layout.size_bytes)
    slot = Slot(0, layout.size_bytes)
    weights = slots.weights(slot, layout)
    for factor in (1, 2):
        fill(slots, slot, layout, [value * factor for value in values])
        assert torch.equal(weights[0], values[0] * factor)


def test_views_are_made_once_for_each_slot_and_bucket() -> None:
    one, other = layout_of(odd_tensors()), layout_of(odd_tensors()[:2], 1)
    size = one.size_bytes
    slots = slots_of(size, size)
    a, b = Slot(0, size), Slot(1, size)
    assert slots.weights(a, one) is slots.weights(a, one)
    relabelled = dataclasses.replace(one, label="3")  # the same buffer in another schedule
    assert slots.weights(a, relabelled) is slots.weights(a, one)
    distinct = {id(slots.weights(s, layout)) for s in (a, b) for layout in (one, other)}
    assert len(distinct) == 4


def test_views_of_a_buffer_that_grew_are_made_anew() -> None:
    layout = layout_of([torch.ones(8)])
    slots = slots_of(layout.size_bytes, layout.size_bytes)
    a, b = Slot(0, layout.size_bytes), Slot(1, layout.size_bytes)
    old, kept = slots.weights(a, layout), slots.weights(b, layout)
    slots.require([Slot(0, 10_000)])
    assert slots.weights(a, layout) is not old
    assert slots.weights(a, layout)[0].data_ptr() == slots.buffers[0].data_ptr()
    assert slots.weights(b, layout) is kept


def test_what_is_forgotten_is_made_anew() -> None:
    """Buckets that are laid out anew may have the keys of old ones, and other sizes."""
    old, new = layout_of([torch.ones(8)]), layout_of([torch.ones(2, 2)])
    slots = slots_of(old.size_bytes, 300)
    slot = Slot(0, old.size_bytes)
    slots.weights(slot, old)
    generation = slots.generation
    buffers = [weakref.ref(buffer) for buffer in slots.buffers]
    slots.forget()
    assert [buffer() for buffer in buffers] == [None, None], "their memory is given back"
    slots.require([slot])
    assert [weight.shape for weight in slots.weights(slot, new)] == [(2, 2)]
    assert slots.generation > generation
