"""The buckets of a model.

take over    copy parameters into buckets, on the host or (residents) on the device
move         move a bucket between host and device, to where the plans want it
adopt        copy what the user replaced since the last call into the buckets
let go       release parameters that left the model from their buckets
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from megacompile import compat, packed, progress
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import Placement, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.passes.stages.units import find_units
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.setting import Setting
from megacompile.progress import bar, line
from megacompile.runtime.checkpoint.contents import Contents
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import TRIM_BYTES, trim_heap
from megacompile.runtime.model import program, sharding
from megacompile.runtime.model.ddp_checks import DdpChecks, refuse_moves
from megacompile.runtime.model.program import Plans
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params import shared_memory
from megacompile.runtime.params.eager_notice import EagerNotice
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.host_bucket import HostBucket, StateMemory
from megacompile.runtime.params.proxies import ParamSource, follow_parts, parts_of
from megacompile.runtime.params.shared_memory import are_parts, warn_of_aliases
from megacompile.runtime.params.swap import Proxies, Undos, undone
from megacompile.validate import check_model


class ModelBuckets:
    """Owns the parameters of a model. The arguments are those of `StreamedModel`."""

    plans: Plans  # for the current layout of the buckets
    proxies: Proxies

    def __init__(
        self, model: nn.Module, setting: Setting, contents: Contents | None, new_bytes: int
    ) -> None:
        self.model = model
        self.setting = setting
        self.options = options = setting.options
        self.ddp = DdpChecks(model, options)
        self.machine = Machine(options)  # a pending backward holds it, but not the model
        ranks = self.machine.ranks
        self.alone = threading.RLock()  # the swap and the slots serve one call at a time
        self.notice = EagerNotice(self.machine.links)
        self._noted: set[int] = set()  # the part of `notice.read` that the plans know
        self._keeps_gradients = options.plans and options.optimizer is None  # on the device
        warn_of_aliases(model, shared_memory.known_aliases(model), self)
        if ranks is not None:
            made = sharding.shard(model, ranks, filled=contents is not None)
            if contents is not None:
                contents.share(made, ranks)
        self._take_over(frozenset(), contents, new_bytes=new_bytes)

    @torch.inference_mode(False)  # memory allocated here outlives inference mode
    def _take_over(
        self,
        resident: frozenset[int],
        contents: Contents | None = None,
        stored: frozenset[int] = frozenset(),
        new_bytes: int = 0,
    ) -> None:
        """Move parameters to buckets, bucket by bucket, and buffers to the device. `resident`
        buckets live on the device, unless the user chose; `stored` ones on the disk, if they have
        moved before. `contents` fills the buckets on the host, and residents move from there."""
        packed.settle(self.model)
        self._twins = packed.twins(self.model)
        options, machine = self.options, self.machine
        dtype, ranks, replicas = options.compute_dtype, options.ranks, options.replicas
        units = find_units(self.model, compute_dtype=dtype, ranks=ranks, replicas=replicas)
        # the leaves of packed parameters are frozen, parameters or not
        named = {x.name: cast(nn.Parameter, x.tensor) for x in packed.leaves(self.model)}
        params = {u.bucket.key: [named[place.name] for place in u.bucket.params] for u in units}
        before = bool(machine.buckets)
        machine.buckets.clear()
        machine.trained.clear()  # their updates refer to old buckets
        if options.resident is not None:
            resident = program.first_that_fit(units, params, options)
        filling = None
        if not before:
            stored = program.weights_on_disk(
                units, params, options, machine.disk, resident, new_bytes
            )
            on_device = {id(param) for key in resident for param in params[key]}
            refuse_moves(self.model, on_device, options.device.type)
            if contents is None and program.fills_later(named.values(), options.device):
                filling = options.device, Background("megacompile-parameters", forks=True)
        places = Places.of(resident, params if machine.disk is not None else (), stored)
        if contents is not None:
            for unit in units:
                key = unit.bucket.key
                tier = Tier.DISK if key in stored else Tier.HOST
                machine.buckets[key] = self._new_bucket(unit.bucket, params[key], tier, empty=True)
            contents.fill(list(machine.buckets.values()), options.progress)
        total = sum(unit.bucket.size_bytes for unit in units)
        with bar("moving parameters to the host", total, options.progress, unit="B") as step:
            kept = 0  # bytes freed since the cache was last emptied
            for unit in units:
                key = unit.bucket.key
                if contents is None or key in resident:
                    machine.buckets[key] = self._new_bucket(
                        unit.bucket, params[key], places[key].weights, filling=filling
                    )
                step(unit.bucket.size_bytes)
                kept += unit.bucket.size_bytes
                if kept > TRIM_BYTES or unit is units[-1]:
                    trim_heap()
                    kept = 0
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # the parameters' old memory
        machine.gradients.bind(machine.buckets)
        machine.slots.forget()
        self.plans = Plans(PassCompiler(self.setting, units), Placement(places))
        self._noted.clear()
        buffers_to(self.model, options.device)
        self._make_proxies()

    def _new_bucket(
        self, layout: Bucket, params: Sequence[nn.Parameter], tier: Tier, **filled: Any
    ) -> HostBucket:
        """A bucket in a kind of memory, with its parameters."""
        options, resident = self.options, tier is Tier.DEVICE
        pin = options.device.type == "cuda" and not resident
        return HostBucket(
            layout,
            params,
            pin=pin,
            grad_dtype=options.grad_dtype,
            pin_masters=pin and options.updates_on_device,
            resident=options.device if resident else None,
            disk=self.machine.disk,
            weights_on_disk=tier is Tier.DISK,
            budget=self.machine.host_budget,
            rank=options.rank,
            **filled,
        )

    def _make_proxies(self) -> None:
        """Make the proxies, last: if they fit the model, so does everything else."""
        self.ddp.checked = None  # parameters may have moved
        self.follow_leaves()
        self.proxies = Proxies(self.model, self.options.device, self._source, self.notice)

    def follow_leaves(self) -> None:
        """Moves the attributes of packed parameters to the memory of their leaves."""
        for twin, leaf in self._twins:
            twin.data = leaf.data
        follow_parts(self.model)

    def before_step(self) -> None:
        """Apply pending moves when an optimizer steps, and adopt data that the user assigned to
        parameters (`p.data = ...`) since the forward."""
        self.machine.steps += 1
        if self.machine.steps == 1:
            self.ddp.warn_if_alone()
        if self.machine.ranks is not None:
            self.machine.ranks.agreement.steps += 1
        buckets = self.machine.buckets.values()
        replaced = [bucket.params[i] for bucket in buckets for i in bucket.replaced()]
        if replaced:
            warn_of_aliases(self.model, are_parts(replaced), self)
        self.move_if_wanted()
        for bucket in self.machine.buckets.values() if replaced else ():  # some may have moved
            if bucket.replaced():
                bucket.pending.settle()
                if not self.machine.exchanged():
                    bucket.adopt()

    def move_if_wanted(self) -> None:
        """Apply the plans' placement of buckets and states, unless a backward is pending."""
        if len(self.notice.read) > len(self._noted):
            self._note_fetches()
        now, wants = self.plans.placement, self.plans.compiler.chooser.wanted
        if wants.placement(now) == now or self.machine.pending:
            return
        with self.alone:
            wanted = wants.placement(now)
            moving = wanted.moving(now)
            if self.machine.links and not self.proxies.are_in:
                self._make_proxies()  # drops the links of an abandoned forward
            if not self.machine.may_move(moving):
                return
            params = [p for key in moving for p in self.machine.buckets[key].params]
            why = now.stays or self.ddp.holds(params)
            if moving and why:
                self.ddp.say(why)
                self.plans.note(stays=why)  # from now on
                self.plans.compiler.chooser.forget()
                self.plans.expire()
            else:
                warn_of_aliases(self.model, self._aliased(moving), self)
                self._move(wanted)

    def _aliased(self, keys: Iterable[int]) -> Iterator[nn.Parameter]:
        """Parameters of buckets whose memory other code references."""
        for bucket in (self.machine.buckets[key] for key in keys):
            bucket.pending.wait()  # an update in flight references the memory too
            yield from (p for i, p in enumerate(bucket.params) if bucket.aliased(i))

    @torch.inference_mode(False)
    def _move(self, wanted: Placement) -> None:
        """Move the buckets, with their gradients; optimizer states move in the next step."""
        self.machine.slots.forget()  # frees memory for buckets that come to the device
        places = wanted.places
        first = places.weights_on_disk  # these free host memory
        with line("", self.options.progress):
            for key in sorted(self.machine.buckets, key=lambda key: key not in first):
                weights, states, *_ = places[key]
                undone(functools.partial(self.move_bucket, key, weights))
                bucket = self.machine.buckets[key]
                on_disk = states is Tier.DISK and bucket.resident is None
                disk = self.machine.disk if on_disk else None
                if disk is not bucket.disk:
                    bucket.pending.settle()
                    bucket.disk = disk
                    bucket.states = StateMemory(bucket)
        self.moved()
        self.plans.placement = wanted  # after an interrupt before this line, the move starts over
        self.plans.expire()

    def moved(self) -> None:
        """Record that buckets have moved, or that parameters have new AccumulateGrad nodes."""
        self.machine.gradients.bind(self.machine.buckets)
        self._make_proxies()

    def move_bucket(self, key: int, tier: Tier, undos: Undos, *, reallocate: bool = False) -> None:
        """Move a bucket's parameters; with `reallocate`, to new memory even if they live there
        already. Call `moved` after the last bucket."""
        old = self.machine.buckets[key]
        if old.tier is tier and not reallocate:
            return
        progress.now(f"moving parameters to the {tier.name.lower()}")
        old.pending.settle()
        undos.append(functools.partial(show_again, [(p, p.grad) for p in old.params]))
        gradients = self.machine.gradients.take(key)
        self.machine.buckets[key] = self._new_bucket(old.whole, old.params, tier)
        self.machine.gradients.put(self.machine.buckets[key], gradients)

    def _source(self, param: torch.Tensor) -> ParamSource:
        key, i = self.machine.gradients.places[id(param)]
        bucket = self.machine.buckets[key]
        copy = bucket.streamed[i] if bucket.has_copy else None
        wrote = functools.partial(bucket.pending.take_back, i)
        resident = bucket.resident is not None
        return ParamSource(bucket.pending.wait, wrote, self.notice, copy, resident)

    def owns(self, param: nn.Parameter) -> bool:
        """True if a parameter is in a bucket of this model."""
        places = self.machine.gradients.places
        return any(id(part) in places for part in (param, *parts_of(param)))

    def let_go(self) -> None:
        """Release parameters that were removed from the model since its last call."""
        with self.alone, unguarded():
            self._adopt(fits=False)

    def refresh(self, fits: bool, modules: Sequence[nn.Module]) -> None:
        """Bring the buckets up to date at the beginning of a call. `fits`: the modules have the
        same parameters as at the last call. Raises ModelError if the model cannot be streamed."""
        if not fits or any(map(HostBucket.replaced, self.machine.buckets.values())):
            self._adopt(fits)
        if self.machine.gradients.outdated():
            self.moved()
        for bucket in self.machine.buckets.values():
            pending = bucket.pending
            if pending.in_flight is not None and pending.in_flight.done():
                pending.wait()
            if pending.left:
                pending.check()
            if bucket.has_copy:
                pending.refresh()
        buffers_to(self.model, self.options.device, modules)

    def follow_plans(self) -> None:
        """Move buckets to where the plans want them, unless code around the call forbids it."""
        ddp = compat.ddp_around()
        if ddp is not None:
            self.plans.note(stays=self.ddp.around(ddp))
        if self.machine.in_backward is not None and self.machine.more_backwards:
            self.plans.note(accumulates=True)
        if (  # for the first time, a forward with a backward finds gradients on the device
            torch.is_grad_enabled()
            and self._keeps_gradients
            and not self.plans.placement.accumulates
            and not self.machine.pending
            and self.machine.gradients.on_device()
        ):
            self.plans.note(accumulates=True)
            if self.plans.compiler.chooser.find_gradients():
                self.plans.expire()
        self.move_if_wanted()

    def rest(self, buckets: Sequence[Bucket]) -> Schedule:
        """Return a schedule that only updates these buckets, at their current placement."""
        return self.plans.compiler.rest(buckets, self.plans.placement)

    def _note_fetches(self) -> None:
        """Tells plans which buckets eager code has read since the last call."""
        new = self.notice.read - self._noted
        self._noted |= new
        read = [b for b in self.machine.buckets.values() if not new.isdisjoint(map(id, b.params))]
        if self.ddp.holds([param for bucket in read for param in bucket.params]):
            return  # these cannot move
        trained = {bucket.layout.key: list(bucket.grad_dtypes()) for bucket in read}
        layouts = [bucket.whole for bucket in read]
        self.plans.compiler.chooser.note_fetches(layouts, trained, self.plans.placement)

    def _adopt(self, fits: bool) -> None:
        """Take over new parameters and parameters whose memory was replaced."""
        buckets = self.machine.buckets.values()
        params = {id(param) for param in self.model.parameters()}
        for bucket in buckets:
            bucket.pending.let_go(params)
            bucket.pending.settle()
        ranks = self.machine.ranks
        check_model(self.model, sharded=ranks is not None)
        if ranks is not None:
            sharding.check_divided(self.model, ranks)
        ours = {value.data_ptr() for bucket in buckets for value in bucket.values}
        whole = (p for p in self.model.parameters() if not packed.is_wrapper(p))
        moved = [p for p in whole if compat.local(p).data_ptr() not in ours]
        known = self.machine.gradients.places
        warn_of_aliases(self.model, are_parts(p for p in moved if id(p) in known), self)
        new = shared_memory.with_aliases(p for p in moved if id(p) not in known)
        warn_of_aliases(self.model, new, self)
        fits = fits and not self.machine.exchanged()
        # reallocate buckets whose old memory other code still references: code that temporarily
        # replaced `p.data` (with the average of an EMA) writes it back later
        left = [key for key, b in self.machine.buckets.items() if fits and b.left_to_others()]
        for key in left:
            tier = self.machine.buckets[key].tier
            undone(functools.partial(self.move_bucket, key, tier, reallocate=True))
        if left:
            self.moved()
        if not fits or not all(bucket.adopt() for bucket in buckets):
            stay = params - set(map(id, moved))
            named = (p for p in self._aliased(self.machine.buckets) if id(p) in stay)
            warn_of_aliases(self.model, named, self)
            self.proxies.forget()
            self.machine.gradients.bind({})
            now = self.plans.placement.places
            # each old bucket is freed while the next one is filled
            self._take_over(now.resident, stored=now.weights_on_disk)
        else:
            self._make_proxies()  # a parameter's memory may have been moved


def buffers_to(model: nn.Module, device: torch.device, modules: Sequence[nn.Module] = ()) -> None:
    """Move a model's buffers to the device; `modules`: all of its modules, if known."""
    places = []
    for holder in compat.holders(modules or compat.modules_of(model), "buffers"):
        for name, buffer in holder.items():
            if buffer is not None and buffer.device != device:
                places.append((holder, name, buffer))
    if not places:
        return
    stray = {id(buffer): buffer for _, _, buffer in places}  # one buffer in several modules
    made = {key: buffer.to(device) for key, buffer in stray.items()}
    for holder, name, buffer in places:
        holder[name] = made[id(buffer)]


def show_again(gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """Set `p.grad` if an interrupt came before its bucket had moved."""
    for param, gradient in gradients:
        if param.grad is None and gradient is not None:
            param.grad = gradient.to(param.device)
