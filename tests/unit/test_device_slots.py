"""DeviceSlots (runtime/device/slots.py): buffers that grow, and buckets as views of them."""

from __future__ import annotations

import weakref

import torch

from megacompile.ir.buckets import Slot
from megacompile.runtime.device.slots import DeviceSlots
from tests.layouts import layout_of, odd_tensors


def slots_of(*sizes: int) -> DeviceSlots:
    made = DeviceSlots(torch.device("cpu"))
    made.require([Slot(i, size) for i, size in enumerate(sizes)])
    return made


def test_only_what_is_too_small_grows() -> None:
    with torch.inference_mode():
        slots = slots_of(100, 300)
    assert not slots.buffers[0].is_inference(), "what follows writes to it outside of that mode"
    first, second = slots.buffers
    generation = slots.generation
    for wanted in ([Slot(0, 100), Slot(1, 200)], []):
        slots.require(wanted)
        assert slots.buffers[0] is first and slots.buffers[1] is second
    assert slots.generation == generation, "nothing was lost"
    slots.require([Slot(0, 200), Slot(1, 200), Slot(2, 200)])
    assert [buffer.numel() for buffer in slots.buffers] == [200, 300, 200]
    assert slots.buffers[0] is not first and slots.buffers[1] is second
    assert slots.generation > generation, "a backward must not take what was in the old buffer"


def test_weights_are_views_with_the_values_of_the_bucket() -> None:
    values = odd_tensors()
    layout = layout_of(values)
    slots = slots_of(16, layout.size_bytes + 1000)
    slot = Slot(1, layout.size_bytes)
    flat = slots.flat(slot, layout)
    assert (flat.numel(), flat.data_ptr()) == (layout.size_bytes, slots.buffers[1].data_ptr())
    weights = slots.weights(slot, layout)
    for factor in (1, 2):  # they show what is in the slot now
        for place, value in zip(layout.params, values, strict=True):
            if place.numel:  # as a prefetch fills it
                part = flat[place.offset_bytes : place.offset_bytes + place.size_bytes]
                part.view(place.dtype).as_strided(place.shape, place.stride).copy_(value * factor)
        for place, weight, value in zip(layout.params, weights, values, strict=True):
            assert torch.equal(weight, value * factor)
            assert (weight.dtype, weight.stride()) == (place.dtype, place.stride)


def test_views_of_a_buffer_that_grew_or_is_forgotten_are_made_anew() -> None:
    """Buckets that are laid out anew may have the keys of old ones, and other sizes."""
    layout, new = layout_of([torch.ones(8)]), layout_of([torch.ones(2, 2)])
    slots = slots_of(layout.size_bytes, layout.size_bytes)
    a, b = Slot(0, layout.size_bytes), Slot(1, layout.size_bytes)
    kept, old = slots.weights(b, layout), weakref.ref(slots.buffers[0])
    slots.weights(a, layout)
    slots.require([Slot(0, 10_000)])
    assert old() is None, "its memory is given back"
    assert slots.weights(a, layout)[0].data_ptr() == slots.buffers[0].data_ptr()
    assert slots.weights(b, layout) is kept
    generation, buffers = slots.generation, [weakref.ref(buffer) for buffer in slots.buffers]
    del kept
    slots.forget()
    assert [buffer() for buffer in buffers] == [None, None]
    slots.require([a])
    assert [weight.shape for weight in slots.weights(a, new)] == [(2, 2)]
    assert slots.generation > generation
