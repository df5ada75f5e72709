"""Plans a model without allocating it: parameters and inputs are shapes, nothing is computed.

    model on `meta`, inputs' shapes  ->  Dynamo on fake tensors  ->  the passes, without `lower`

The result is the schedules that `megacompile(model)` would run on CUDA. If torch has no CUDA, the
metas say `cpu`, because autograd refuses tensors of a device that torch was not built for;
attention is then traced as the CPU's flash attention, which saves and computes the same values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat
from megacompile.cost.hardware import Hardware
from megacompile.errors import ModelError
from megacompile.garbage import old_objects_left_out
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import (
    Ambient,
    Capture,
    ConstantInput,
    GraphInput,
    PackedInput,
    ParamInput,
    Variant,
)
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.values import expected_tangents
from megacompile.options import Lowering, Options
from megacompile.packed import any_packed, is_wrapper, leaves, on_device, taken_apart
from megacompile.passes.stages.units import find_units
from megacompile.plan.compiler import PassCompiler, SettledPlans
from megacompile.plan.pipeline import Planned
from megacompile.plan.setting import Setting
from megacompile.text import printable


def abstract_options(**given: Any) -> Options:
    """Resolve options as `megacompile()` would on a CUDA device, even if this machine has none.

    Raises:
        OptionError: as `megacompile()` does.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return Options.resolve(**{"lowering": Lowering.INDUCTOR, "device": device, **given})


@dataclass(frozen=True, slots=True)
class AbstractProgram:
    """A captured graph and its stages, from which schedules are built."""

    capture: Capture
    stages: Schedule
    plans: SettledPlans
    is_last: bool  # no other graph runs between its forward and its backward

    @property
    def compiler(self) -> PassCompiler:
        """The planner shared by all programs of a model."""
        return self.plans.compiler

    def planned(self) -> Planned:
        """The input of `SettledPlans.schedule`: a step in the middle of training, whose backward
        takes weights that the forward left in the slots, if no other graph runs in between."""
        update = self.compiler.setting.options.optimizer is not None
        tangents = expected_tangents(self.stages)
        variant = Variant(tangents, keep_last=True, reuse=self.is_last, update=update)
        return Planned(self.stages, self.capture, variant)

    def schedule(self) -> Schedule:
        """Build and verify the schedule, without code."""
        return self.plans.schedule(self.planned())


def abstract_programs(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    hardware: Hardware | None = None,
) -> list[AbstractProgram]:
    """Capture `model(*args, **kwargs)` on fake tensors: one program for each captured graph.

    Args:
        model: on any device, including `meta`; it is unchanged after the call.
        args, kwargs: the model's inputs. Tensors may be on any device; their data is not read.
        options: default: those of `megacompile(model)` on CUDA.
        hardware: the machine to plan for; default: this one. If `options` do not limit device
            memory, plans may use all of the machine's except 5 % or 4 GiB, whichever is less.

    Raises:
        ModelError: `model` is not a module or has no parameters, a packed parameter's class does
            not wrap other tensors (bitsandbytes), or no graph was captured.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"to plan for: got {type(model).__name__}; needed a torch.nn.Module")
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters to plan for; needed one")
    return _Capturing(model, options or abstract_options(), hardware).run(args, kwargs or {})


class _Capturing:
    """One call of a model under Dynamo, on fake tensors."""

    def __init__(self, model: nn.Module, options: Options, hardware: Hardware | None) -> None:
        self.model = model
        self.options = options
        self.fakes = compat.fake_mode()
        units = find_units(
            model,
            compute_dtype=options.compute_dtype,
            ranks=options.ranks,
            replicas=options.replicas,
        )
        self.plans = SettledPlans(PassCompiler(Setting(options, hardware), units))
        self.captures: list[Capture] = []
        self.inputs: dict[int, torch.Tensor] = {}  # fake, by the id of the real input
        self.places: dict[int, tuple[Bucket, int]] = {}  # by the id of a fake leaf
        self.made: dict[int, torch.Tensor] = {}  # fake, by the id of a parameter or buffer
        self.packed: set[type] = set()  # classes of the packed parameters that wrap others
        by_name = {p.name: (u.bucket, i) for u in units for i, p in enumerate(u.bucket.params)}
        self.by_leaf = {
            id(leaf.tensor): by_name[leaf.name] for leaf in leaves(model) if leaf.name in by_name
        }

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[AbstractProgram]:
        compat.note_uncaptured()
        breaks = compat.uncaptured()
        given = compat.tree_map(self._fake_input, (tuple(args), dict(kwargs)))
        with self._swapped_in():
            call = compat.frame_of(self.model, f"abstract_{type(self.model).__name__}")
            with old_objects_left_out(), compat.without_collecting():
                torch.compile(call, backend=self._backend)(*given[0], **given[1])
        if not self.captures:
            why = ""
            if compat.uncaptured() > breaks and (found := next(iter(compat.graph_breaks()), None)):
                why = f": {found.why}" + (f" ({found.file}:{found.line})" if found.file else "")
            raise ModelError(
                f"{type(self.model).__name__} cannot be captured{why}; TORCH_LOGS=graph_breaks "
                "shows more"
            )
        partition = self.plans.compiler.pipeline.partition
        last = self.captures[-1]
        return [
            AbstractProgram(each, partition(each), self.plans, each is last)
            for each in self.captures
        ]

    def _backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return functools.partial(self._run, module)

    def _run(self, module: fx.GraphModule, *args: Any) -> Any:
        if all(module is not capture.module for capture in self.captures):
            self.captures.append(self._captured(module, args))
        with self.fakes:
            return module(*args)

    def _captured(self, module: fx.GraphModule, args: Sequence[Any]) -> Capture:
        name = printable(type(self.model).__name__)
        name += f".{len(self.captures)}" if self.captures else ""
        device = self.options.device
        inputs = tuple(self._input(arg) for arg in args)
        return Capture(name, module, inputs, device, Ambient.current(device))

    def _input(self, arg: Any) -> GraphInput:
        if is_wrapper(arg) and type(arg) in self.packed:
            wrapping, parts = taken_apart(arg)
            inputs = (ParamInput(*self.places[id(part)], requires_grad=False) for part in parts)
            return PackedInput(wrapping, tuple(inputs))
        if isinstance(arg, torch.Tensor):
            if id(arg) in self.places:
                return ParamInput(*self.places[id(arg)], arg.requires_grad)
            return TensorMeta.of(arg)
        return ConstantInput(arg)

    def _fake_input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.inputs:  # one tensor given twice is one input
            dtype = self.options.compute_dtype if value.dtype == torch.float32 else None
            self.inputs[id(value)] = self._fake(value, dtype or value.dtype)
        return self.inputs[id(value)]

    def _fake(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self.fakes:
            fake = torch.empty_strided(
                like.shape, like.stride(), dtype=dtype, device=self.options.device
            )
        return fake.requires_grad_(like.requires_grad and like.is_leaf)

    @contextlib.contextmanager
    def _swapped_in(self) -> Iterator[None]:
        """Replaces the model's parameters and buffers with fake ones inside the block."""
        modules = list(self.model.modules())
        holders = compat.holders(modules, "parameters") + compat.holders(modules, "buffers")
        each = [(holder, *item) for holder in holders for item in holder.items()]
        sites = [site for site in each if site[2] is not None]
        for holder, name, tensor in sites:
            holder[name] = self._known(tensor)
        try:
            yield
        finally:
            for holder, name, tensor in sites:
                holder[name] = tensor

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.made:
            self.made[id(tensor)] = self._stand_in(tensor)
        return self.made[id(tensor)]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_wrapper(tensor):
            wrapping, parts = taken_apart(tensor)
            if all(id(part) in self.by_leaf for part in parts):
                self.packed.add(wrapping.cls)
                with self.fakes:
                    whole = on_device(wrapping, self.options.device)(*map(self._known, parts))
                whole._is_param = True
                return whole
        if id(tensor) not in self.by_leaf:
            return self._fake(tensor, tensor.dtype)
        bucket, i = self.by_leaf[id(tensor)]
        fake = self._fake(tensor.detach(), bucket.params[i].dtype)
        if isinstance(tensor, nn.Parameter):
            if any_packed([tensor]):
                raise ModelError(
                    f"to plan for: got a parameter of class {type(tensor).__name__}, whose code "
                    "needs values; needed ordinary ones, or those of torchao"
                )
            fake = nn.Parameter(fake, tensor.requires_grad)
        self.places[id(fake)] = (bucket, i)
        return fake
