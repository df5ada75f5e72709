"""The ops of a schedule on symbols: `Machine` is `tests.symbolic.Layout` with the ops of the
executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megacompile.ir.buckets import Bucket
from megacompile.ir.stages import ArgRef, ParamRef, SavedRef, Stage, Template
from tests.symbolic import (
    NOTHING,
    POISON,
    Cells,
    Copy,
    Crash,
    Group,
    Layout,
    Run,
    States,
    Tensor,
    Update,
    Value,
    Weights,
    fills,
    term,
)

Read = Callable[[Cells], int]
Result = tuple[Run, Value]
Results = tuple[Run, tuple[Value, ...]]


class Machine(Layout):
    """Each op gives what it runs, and its value, by the contracts of `megacompile.ir.ops`."""

    def _begin(self) -> Result:
        return _nothing, NOTHING

    _drain = _begin  # what earlier graphs deferred, no name of this one stands for

    def _prefetch(self, bucket: Bucket, slot: Any) -> Result:
        into, source = self._slot(slot, bucket), self.persistent["params", bucket.key]

        def run(cells: Cells) -> None:
            cells[into] = cells[source]

        return run, Weights(into, bucket)

    def _reuse(self, bucket: Bucket, slot: Any) -> Result:
        return _nothing, Weights(self._slot(slot, bucket), bucket)

    def _resident(self, bucket: Bucket) -> Result:
        return _nothing, Weights(self.persistent["params", bucket.key], bucket)

    def _slot(self, slot: Any, bucket: Bucket) -> int:
        if slot is None or self.sizes.get(slot.index, -1) < bucket.size_bytes:
            raise Crash(f"{slot} is too small, or not there")
        return self.slots[slot.index]

    def _save_rng(self, stage: Stage) -> Result:
        return self._copy(self.rng)

    def _snapshot(self, tensor: Any) -> Result:
        return self._copy(self.tensor(tensor))

    def _copy(self, source: int) -> Result:
        made = self.cell()

        def run(cells: Cells) -> None:
            cells[made] = cells[source]

        return run, Tensor(made)

    def _assign(self, target: Any, value: Any, counted: bool = True) -> Result:
        into, source = self.tensor(target), self.tensor(value)

        return self._copies([(into, source)]), Tensor(into)

    def _primals(self, stage: Stage, weights: Any, args: Any) -> list[Read | None]:
        """How to read each of a stage's inputs; None for what is not given."""
        found: list[Read | None] = []
        for ref in stage.primals:
            given = weights if isinstance(ref, ParamRef) else args
            index = ref.bucket if isinstance(ref, ParamRef) else ref.index
            if index >= len(given):
                raise Crash(f"stage {stage.index} is given too little")
            if given[index] is None:
                found.append(None)
            elif isinstance(ref, ParamRef):
                value = self.get(given[index])
                if not isinstance(value, Weights) or ref.param >= len(value.bucket.params):
                    raise Crash(f"{given[index]} is no weights")
                found.append(_part(value.slot, value.bucket.params[ref.param].offset_bytes))
            else:
                found.append(_whole(self.tensor(given[index])))
        return found

    def _forward(self, stage: Stage, weights: Any, args: Any, saving: bool) -> Results:
        template = stage.traced
        reads = _all(self._primals(stage, weights, args))
        keeps = [reads[i] for i in template.recompute_primals]
        outs = [self.cell() for _ in range(stage.result_count)]
        saved = [self.cell() for _ in range(len(template.saved) if saving else 0)]

        def run(cells: Cells) -> None:
            rng = self._draw(cells) if template.random else 0
            given, kept = _read(reads, cells), _read(keeps, cells)
            for i, cell in enumerate(outs):
                cells[cell] = term("output", id(template), i, rng, *given)
            for i, cell in enumerate(saved):
                cells[cell] = term("saved", id(template), i, rng, *kept)

        return run, tuple(map(Tensor, (*outs, *saved)))

    def _draw(self, cells: Cells) -> int:
        rng = cells[self.rng]
        cells[self.rng] = term("next", rng)
        return rng

    def _recompute(self, stage: Stage, weights: Any, args: Any, rng: Any) -> Results:
        template = stage.traced
        primals = self._primals(stage, weights, args)
        reads = _all([primals[i] for i in template.recompute_primals])
        if template.random and rng is None:
            raise Crash("a random stage without a generator's state gives its outputs too")
        return self._again("saved", template, reads, rng, len(template.saved))

    def _rerun(self, stage: Stage, weights: Any, args: Any, rng: Any) -> Results:
        reads = _all(self._primals(stage, weights, args))
        return self._again("output", stage.traced, reads, rng, len(stage.outputs))

    def _again(
        self, kind: str, template: Template, reads: list[Read], rng: Any, count: int
    ) -> Results:
        """What a stage computes once more, with the numbers that it drew."""
        state = None if rng is None else self.tensor(rng)
        made = [self.cell() for _ in range(count)]

        def run(cells: Cells) -> None:
            drawn = 0
            if template.random:
                drawn = self._draw(cells) if state is None else cells[state]
            given = _read(reads, cells)
            for i, cell in enumerate(made):
                cells[cell] = term(kind, id(template), i, drawn, *given)

        return run, tuple(map(Tensor, made))

    def _backward(
        self,
        stage: Stage,
        weights: Any,
        args: Any,
        saved: Any,
        tangents: Any,
        partial_gradients: Any,
    ) -> Results:
        template = stage.traced
        primals = self._primals(stage, weights, args)
        arg_partial_gradients = [
            i for i in template.partial_gradients if isinstance(stage.primals[i], ArgRef)
        ]
        values, groups = (
            partial_gradients[: len(arg_partial_gradients)],
            partial_gradients[len(arg_partial_gradients) :],
        )
        so_far = {group.key: dict(group.of) for group in map(self.group, groups)}
        if len(values) < len(arg_partial_gradients) or len(saved) < len(template.saved):
            raise Crash("too few partial gradients or saved tensors")
        reads: list[Read] = []
        for item in template.backward_inputs:
            if isinstance(item, SavedRef):
                reads.append(_whole(self.tensor(saved[item.index])))
            else:
                reads += _all([primals[item]])
        reads += [_whole(self.tensor(tangent)) for tangent in tangents]
        flowing = iter(values)
        for i in template.partial_gradients:
            ref = stage.primals[i]
            if isinstance(ref, ArgRef):
                reads.append(_whole(self.tensor(next(flowing))))
            else:
                try:
                    reads.append(_whole(so_far[stage.buckets[ref.bucket].key][ref.param]))
                except KeyError:
                    raise Crash("no gradients so far") from None
        if len(reads) != len(template.backward_inputs) + len(template.tangent_metas):
            raise Crash("a backward takes more, or less")
        return self._gradients(stage, reads, so_far)

    def _gradients(
        self, stage: Stage, reads: list[Read], so_far: dict[int, dict[int, int]]
    ) -> Results:
        template = stage.traced
        made = {primal: self.cell() for primal in template.gradients}
        of_args: list[Value] = []
        for primal, cell in made.items():
            ref = stage.primals[primal]
            if isinstance(ref, ArgRef):
                of_args.append(Tensor(cell))
            else:
                so_far.setdefault(stage.buckets[ref.bucket].key, {})
        merged = {b.key: dict(so_far[b.key]) for b in stage.gradient_buckets}
        for primal, cell in made.items():
            ref = stage.primals[primal]
            if isinstance(ref, ParamRef):
                merged[stage.buckets[ref.bucket].key][ref.param] = cell

        def run(cells: Cells) -> None:
            given = _read(reads, cells)
            for primal, cell in made.items():
                cells[cell] = term("gradient", id(template), primal, *given)

        groups = [Group(key, tuple(of.items())) for key, of in merged.items()]
        return run, (*of_args, *groups)

    # Saved tensors that wait elsewhere.

    def _offload_saved(self, stage: Stage, value: Any) -> Result:
        made = self.cell()
        return self._copies([(made, self.tensor(value))]), Copy(made)

    def _write_saved(self, stage: Stage, on_host: Any) -> Result:
        buffer, made = self.copied(on_host).cell, self.cell()
        return self._moved(made, buffer), Copy(made, on_disk=True)

    def _read_saved(self, stage: Stage, on_disk: Any) -> Result:
        source, made = self.copied(on_disk, on_disk=True).cell, self.cell()
        return self._copies([(made, source)]), Copy(made, once=True)

    def _moved(self, into: int, buffer: int) -> Run:
        """Copied from a buffer that somebody else gets then."""

        def run(cells: Cells) -> None:
            self._put(cells, into, cells[buffer])
            cells[buffer] = POISON

        return run

    def _alloc_saved(self, stage: Stage, copy: Any) -> Result:
        self.copied(copy, on_disk=None)
        made = self.cell()
        return fills([made], POISON), Tensor(made)

    def _fetch_saved(self, stage: Stage, on_host: Any, buffer: Any) -> Result:
        source, into = self.copied(on_host), self.tensor(buffer)
        if source.once:
            return self._moved(into, source.cell), Tensor(into)
        return self._copies([(into, source.cell)]), Tensor(into)

    # Gradients on the host.

    def _alloc_grad(self, bucket: Bucket) -> Result:
        buffer = tuple((i, self.cell()) for i in self._trained(bucket.key))
        return fills([cell for _, cell in buffer], POISON), Group(bucket.key, buffer)

    def _fetch_grad(self, bucket: Bucket, buffer: Any) -> Result:
        group = self.group(buffer)
        pairs = [(cell, self._host_grad(group.key, i)) for i, cell in group.of]
        return self._copies(pairs), group

    def _trained(self, key: int) -> Sequence[int]:
        try:
            return self.gradient_params[key]
        except KeyError:
            raise Crash(f"bucket {key} gets no gradients") from None

    def _every(self, bucket: Bucket, gradients: Any) -> list[int]:
        """The cells of the gradients of all parameters that are trained."""
        of = dict(self.group(gradients).of)
        if not of.keys() >= set(self._trained(bucket.key)):
            raise Crash(f"not all gradients of bucket {bucket.label}")
        return [of[i] for i in self._trained(bucket.key)]

    def _host_grad(self, key: int, i: int) -> int:
        try:
            return self.persistent["gradient", key, i]
        except KeyError:
            raise Crash(f"no gradient {i} of bucket {key}") from None

    def _add_grad(self, bucket: Bucket, so_far: Any, gradients: Any) -> Result:
        total, new = self.group(so_far), self.group(gradients)
        to = dict(total.of)
        if not to.keys() >= dict(new.of).keys():
            raise Crash("gradients that there is no buffer for")
        pairs = [(to[i], cell) for i, cell in new.of]

        def run(cells: Cells) -> None:
            for into, source in pairs:
                self._put(cells, into, term("+", cells[into], cells[source]))

        return run, total

    def _norm_grad(self, bucket: Bucket, gradients: Any, largest: bool = True) -> Result:
        sources, made = self._every(bucket, gradients), self.cell()

        def run(cells: Cells) -> None:
            cells[made] = term("norms", *_at(cells, sources))

        return run, Tensor(made)

    def _keep_grad(self, bucket: Bucket, gradients: Any) -> Result:
        if bucket.key not in self.schedule.plan.resident:
            raise Crash(f"bucket {bucket.label} is on the host")
        return self._offload_grad(bucket, gradients)

    def _offload_grad(self, bucket: Bucket, gradients: Any, norms: Any = None) -> Result:
        group = self.group(gradients)
        pairs = [(self._host_grad(group.key, i), cell) for i, cell in group.of]
        if norms is not None:
            pairs.append((self.persistent["norms", group.key], self.tensor(norms)))
        return self._copies(pairs), NOTHING

    # Updates.

    def _alloc_state(self, bucket: Bucket, masters: bool) -> Result:
        buffer = States(self.cell(), bucket)
        return fills([buffer.cell], POISON), buffer

    def _states(self, key: int) -> int:
        """Where ops find and leave states: those on a disk have a buffer in memory for a while."""
        return self.persistent.get(("staged", key), self.persistent["states", key])

    def _read_state(self, bucket: Bucket) -> Result:
        into, source = self._staged(bucket), self.persistent["states", bucket.key]
        return self._copies([(into, source)]), NOTHING

    def _write_state(self, bucket: Bucket) -> Result:
        return self._moved(self.persistent["states", bucket.key], self._staged(bucket)), NOTHING

    def _staged(self, bucket: Bucket) -> int:
        try:
            return self.persistent["staged", bucket.key]
        except KeyError:
            raise Crash(f"states of bucket {bucket.label} are on no disk") from None

    def _fetch_state(self, bucket: Bucket, buffer: Any, masters: bool) -> Result:
        into = self._buffer(bucket, buffer)
        sources = [self._states(bucket.key)]
        sources += [self.persistent["params", bucket.key]] if masters else []

        def run(cells: Cells) -> None:
            self._put(cells, into.cell, term("fetched", *_at(cells, sources)))

        return run, into

    def _buffer(self, bucket: Bucket, buffer: Any) -> States:
        """A buffer for a bucket; that of another one does where their parameters are alike."""
        made = self.states(buffer)
        mine, theirs = bucket.params, made.bucket.params
        if [(p.shape, p.dtype) for p in mine] != [(p.shape, p.dtype) for p in theirs]:
            raise Crash("buffer of another size")
        return made

    def _update(self, bucket: Bucket, weights: Any, gradients: Any, state: Any) -> Result:
        buffers, sources = self._buffer(bucket, state), self._every(bucket, gradients)
        given = None if weights is None else self.get(weights)
        if given is not None and not isinstance(given, Weights):
            raise Crash("no weights")

        def run(cells: Cells) -> None:
            old = term("no weights") if given is None else cells[given.slot]
            new = _at(cells, sources)
            new += [cells[self.persistent["clip"]]] if self.clips else []
            updated = term("updated", bucket.key, old, *new, cells[buffers.cell])
            self._put(cells, buffers.cell, updated)

        return run, buffers

    def _offload_state(self, bucket: Bucket, updated: Any, norms: Any = None) -> Result:
        cell = self._buffer(bucket, updated).cell
        host = [self.persistent["params", bucket.key], self._states(bucket.key)]
        pairs = [(into, cell) for into in host]
        if norms is not None:
            pairs.insert(0, (self.persistent["norms", bucket.key], self.tensor(norms)))
        return self._copies(pairs), NOTHING

    # The step, of what lies where it is.

    def _update_host(self, bucket: Bucket) -> Result:
        if bucket.key in self.schedule.plan.resident:
            raise Crash(f"bucket {bucket.label} is on the device")
        return self._in_place(bucket), Update(bucket.key)

    def _update_resident(self, bucket: Bucket) -> Result:
        if bucket.key not in self.schedule.plan.resident:
            raise Crash(f"bucket {bucket.label} is on the host")
        return self._in_place(bucket), NOTHING

    def _update_in_place(self, bucket: Bucket, gradients: Any, norms: Any = None) -> Result:
        key, sources = bucket.key, self._every(bucket, gradients)
        if key not in self.schedule.plan.resident:
            raise Crash(f"bucket {bucket.label} is on the host")
        params, states = self.persistent["params", key], self.persistent["states", key]
        into = self.persistent["norms", key]
        taken = None if norms is None else self.tensor(norms)

        def run(cells: Cells) -> None:
            content = term("updated", key, cells[params], *_at(cells, sources))
            cells[params] = cells[states] = term("stepped", content, cells[states])
            if taken is not None:
                cells[into] = cells[taken]

        return run, NOTHING

    def _in_place(self, bucket: Bucket) -> Run:
        key = bucket.key
        params, states = self.persistent["params", key], self._states(key)
        if not self.gradient_params.get(key):
            return _nothing
        read = [params, states, *(self._host_grad(key, i) for i in self._trained(key))]
        read += [self.persistent["clip"]] if self.clips else []

        def run(cells: Cells) -> None:
            content = term("stepped", key, *_at(cells, read))
            cells[params] = cells[states] = content

        return run

    def _help_host(self, updates: Any) -> Result:
        for update in updates:
            value = self.get(update)
            if not isinstance(value, Update) and not (value is NOTHING and self.skips):
                raise Crash(f"{update} is no update of the host")
        return _nothing, NOTHING  # whoever makes an update, it is the same


def _at(cells: Cells, wanted: list[int]) -> list[int]:
    return [cells[cell] for cell in wanted]


def _nothing(cells: Cells) -> None:
    del cells


def _whole(cell: int) -> Read:
    return lambda cells: cells[cell]


def _part(cell: int, offset: int) -> Read:
    return lambda cells: term("part", offset, cells[cell])


def _all(reads: list[Read | None]) -> list[Read]:
    found = [read for read in reads if read is not None]
    if len(found) != len(reads):
        raise Crash("an input is not given")
    return found


def _read(reads: list[Read], cells: Cells) -> list[int]:
    return [read(cells) for read in reads]
