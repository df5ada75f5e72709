"""Captured graphs: a program for each kind of call, and eager code where there can be none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megacompile import UnsupportedGraphError, compat, schedules
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Capture, ConstantInput, ParamInput, TensorInput, Variant
from megacompile.ir.placement import Placement
from megacompile.ir.schedule import Schedule
from megacompile.runtime.device.slots import DeviceSlots
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.model.captured import SHAPES_AT_ONCE, CapturedGraph
from megacompile.runtime.model.plans import Plans
from megacompile.runtime.model.program import Program
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.gradients import Gradients
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.updates.on_device import DeviceUpdates
from tests import inside
from tests.capturing import capture
from tests.quantized import Int8
from tests.schedules import Spec, build
from tests.zoo import WIDTH, batch, differences, equal, graph_break, stack, step, twins

CPU = torch.device("cpu")
BUCKET = Bucket.layout(0, "unit", [("weight", torch.empty(3)), ("bias", torch.empty(2))])


class Compiler:
    """Notes what it is asked for; its schedules are made by hand and never run."""

    def wants(self, placement: Placement) -> Placement:
        return placement

    def resized(self, stages: Schedule, values: Any) -> Schedule:
        raise AssertionError("no size is a symbol")

    def replan(self) -> None:
        raise AssertionError("no bucket was to move")

    def find_gradients(self) -> bool:
        return False

    def code_is_ready(self) -> bool:
        return False

    def load_code(self, patience_s: float) -> bool:
        raise AssertionError("there is none")

    def use_code(self) -> None:
        raise AssertionError("there is none")

    def step_down(self) -> str:
        return ""

    def needs(self) -> str:
        return ""

    def retain(self, stages: Any, schedules: Any) -> None:
        pass

    def rest(self, buckets: Any, resident: Any) -> Schedule:
        raise AssertionError("no optimizer steps")

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.captures: list[Capture] = []
        self.built: list[Variant] = []

    def partition(self, capture: Capture) -> Schedule:
        self.captures.append(capture)
        if self.error is not None:
            raise self.error
        return build(Spec(training=False))

    def choose(
        self, stages: Schedule, capture: Capture, variant: Variant, placement: Placement
    ) -> Placement:
        return placement

    def plan(
        self, stages: Schedule, capture: Capture, variant: Variant, placement: Placement
    ) -> Schedule:
        self.built.append(variant)
        return stages

    def lower(self, schedule: Schedule) -> Schedule:
        return schedule


def machine(place: Callable[[Any], tuple[Bucket, int]] = lambda proxy: (BUCKET, 0)) -> Machine:
    streams = Streams(CPU)
    return Machine(
        CPU, streams, DeviceSlots(CPU), {}, Gradients(streams), place, DeviceUpdates(streams)
    )


def doubling() -> fx.GraphModule:
    """x -> (2 x,)"""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.mul, (graph.placeholder("x"), 2)),))
    return fx.GraphModule(nn.Module(), graph)


def captured(compiler: Compiler, machine: Machine | None = None) -> CapturedGraph:
    """A graph that gives the program it is run by."""

    def run(program: Program, args: Sequence[Any]) -> Sequence[Any]:
        return [program]

    made = machine or globals()["machine"]()
    plans = Plans(compiler, Placement())
    return CapturedGraph("Model.1", doubling(), lambda: plans, made, run)


# --- a program for each kind of call

KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(4, 6),
    "shape": lambda: torch.ones(3, 6),
    "dtype": lambda: torch.ones(4, 6, dtype=torch.float64),
    "strides": lambda: torch.ones(6, 4).t(),
    "requires grad": lambda: torch.ones(4, 6, requires_grad=True),
    "int": lambda: 3,
    "another int": lambda: 4,
    "float": lambda: 3.0,
    "bool": lambda: True,
    "one": lambda: 1,
    "zero": lambda: 0.0,
    "minus zero": lambda: -0.0,
    "nan": lambda: float("nan"),
    "class": lambda: nn.Parameter(torch.ones(4, 6), requires_grad=False),
}


def test_each_kind_of_input_has_a_program() -> None:
    compiler = Compiler()
    graph = captured(compiler)
    programs = [graph(make())[0] for make in KINDS.values()]
    assert len(set(programs)) == len(KINDS)
    assert [graph(make())[0] for make in KINDS.values()] == programs, "and keeps it"
    assert len(compiler.captures) == len(compiler.built) == len(KINDS)


def test_a_program_knows_what_it_was_captured_with() -> None:
    places = {}
    host = torch.ones(2)
    proxy = StreamedParameter(host, CPU)
    proxy.requires_grad_()
    places[id(proxy)] = (BUCKET, 1)
    compiler = Compiler()
    graph = captured(compiler, machine(lambda p: places[id(p)]))
    graph(torch.ones(4, 6), proxy, 7)
    (found,) = compiler.captures
    assert (found.name, found.device, found.module) == ("Model.1", CPU, graph.module)
    tensor, param, number = found.inputs
    assert isinstance(tensor, TensorInput) and str(tensor.meta) == "f32[4, 6]"
    assert param == ParamInput(BUCKET, 1, True)
    assert number == ConstantInput(7)
    assert compiler.built == [
        Variant((), keep_last=True, accumulate=False, reuse=False, update=False)
    ]


def test_parameters_are_told_apart_by_their_place() -> None:
    """The same code on another layer, or with a frozen one, is another program."""
    proxies = [StreamedParameter(torch.ones(3), CPU) for _ in range(2)]
    places = {id(proxy): (BUCKET, i) for i, proxy in enumerate(proxies)}
    graph = captured(Compiler(), machine(lambda p: places[id(p)]))
    programs = [graph(proxy)[0] for proxy in (*proxies, proxies[0])]
    assert programs[0] is programs[2] and programs[0] is not programs[1]
    proxies[0].requires_grad_()
    assert graph(proxies[0])[0] not in programs


def test_how_a_packed_parameter_is_put_together_is_part_of_the_key() -> None:
    """The same parts, read as another dtype, are another weight."""
    proxies = [StreamedParameter(torch.ones(3, n), CPU) for n in (4, 1)]
    places = {id(proxy): (BUCKET, i) for i, proxy in enumerate(proxies)}
    graph = captured(Compiler(), machine(lambda p: places[id(p)]))
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    programs = [graph(Int8(*proxies, dtype, CPU))[0] for dtype in dtypes]
    assert programs[0] is programs[2] and programs[0] is not programs[1]


def test_another_layout_is_another_kind_of_input() -> None:
    graph = captured(Compiler())
    dense = torch.ones(2, 2)
    assert isinstance(graph(dense)[0], Program)
    with pytest.warns(UserWarning, match="an input has layout torch.sparse_coo"):
        assert equal(graph(dense.to_sparse())[0].to_dense(), 2 * dense)


def test_stages_of_an_equal_capture_are_for_the_same_numbers() -> None:
    """They are remembered for when buckets move (`Pipeline.partition`)."""
    values = (0.0, -0.0, 0, False, 1.0, 1, True, float("nan"))
    assert len({ConstantInput(value) for value in values}) == len(values)
    assert all(ConstantInput(value) == ConstantInput(value) for value in values)
    assert ConstantInput(float("nan")) == ConstantInput(float("nan"))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_state_of_the_thread_and_the_process_has_a_program() -> None:
    graph = captured(Compiler())
    x = torch.ones(2)
    states: list[Callable[[], Any]] = [
        torch.enable_grad,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: torch.backends.cudnn.flags(enabled=False),
        deterministic,
    ]
    programs = []
    for _ in range(2):
        for state in states:
            with state():
                programs.append(graph(x)[0])
    assert programs[: len(states)] == programs[len(states) :]
    assert len(set(programs)) == len(states)


def test_inference_on_ever_new_shapes_is_scheduled_when_a_shape_recurs() -> None:
    """As in generation, where each token makes the input longer."""
    compiler = Compiler()
    graph = captured(compiler)
    with torch.no_grad():
        for size in range(1, SHAPES_AT_ONCE + 4):
            (got,) = graph(torch.ones(size))
            assert isinstance(got, Program) is (size <= SHAPES_AT_ONCE)
        assert equal(got, torch.full((SHAPES_AT_ONCE + 3,), 2.0))
        assert isinstance(graph(torch.ones(SHAPES_AT_ONCE + 3))[0], Program)
        assert len(compiler.captures) == SHAPES_AT_ONCE + 1
    assert isinstance(graph(torch.ones(SHAPES_AT_ONCE + 2))[0], Program), "training at once"


def test_new_buckets_need_new_programs() -> None:
    compilers = [Compiler(), Compiler()]
    plans = [Plans(compiler, Placement()) for compiler in compilers]
    graph = captured(compilers[0])
    now = 0
    graph.current_plans = lambda: plans[now]
    first = graph(torch.ones(2))[0]
    assert graph(torch.ones(2))[0] is first
    now = 1
    assert graph(torch.ones(2))[0] is not first
    assert [len(compiler.captures) for compiler in compilers] == [1, 1]


def test_variants_of_a_program_are_built_once() -> None:
    compiler = Compiler()
    program = captured(compiler)(torch.ones(2))[0]
    accumulating = program.variant(accumulate=True)
    assert accumulating == Variant((), keep_last=True, accumulate=True, reuse=False)
    executor = program.executor(accumulating)
    assert program.executor(Variant((), True, True)) is executor
    assert program.executor(program.variant()) is not executor
    assert [variant.accumulate for variant in compiler.built] == [False, True]


# --- what a forward expects of its backward


class Outputs(nn.Module):
    """Gives hidden states, scalar losses, positions and a constant, in an order of choice."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.order = order

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        h = self.layer(x)
        found = {
            "h": h,
            "t": h.tanh(),
            "l": h.square().mean(),
            "m": h.mean(),
            "i": h.argmax(-1),
            "d": h.detach() * 2,
        }
        return tuple(found[name] for name in self.order)


@pytest.mark.parametrize(
    ("order", "tangents"),
    [
        ("l", (0,)),
        ("hl", (1,)),  # a scalar loss alone
        ("lh", (0,)),
        ("ht", (0, 1)),
        ("hml", (1,)),  # the first scalar
        ("ih", (1,)),
        ("dlh", (1,)),  # a constant gets none
        ("hh", (0,)),  # the same value twice
        ("id", ()),
    ],
)
def test_which_outputs_are_expected_to_get_a_gradient(
    order: str, tangents: tuple[int, ...]
) -> None:
    found = capture(Outputs(order), batch()["x"])
    program = Program(found.capture, partitioned(found.partition()), machine())
    assert program.tangents == tangents
    assert [program.differentiable(k) for k in program.tensor_outputs()] == [
        order[k] in "htlm" for k in program.tensor_outputs()
    ]


class Partitioned(Compiler):
    """Gives stages that there are already."""

    def __init__(self, stages: Schedule) -> None:
        super().__init__()
        self.stages = stages

    def partition(self, capture: Capture) -> Schedule:
        return self.stages


def partitioned(stages: Schedule) -> Plans:
    return Plans(Partitioned(stages), Placement())


def test_nothing_is_expected_without_grad() -> None:
    with torch.no_grad():
        found = capture(Outputs("hl"), batch()["x"])
    program = Program(found.capture, partitioned(found.partition()), machine())
    assert program.tangents == ()
    assert not program.differentiable(0)


# --- graphs that cannot be scheduled


def test_an_unsupported_graph_runs_in_eager_mode_and_is_said_once() -> None:
    compiler = Compiler(UnsupportedGraphError("stage 'layers.1': no kernel for aten.odd"))
    graph = captured(compiler)
    with pytest.warns(UserWarning) as said:
        assert equal(graph(torch.ones(2))[0], torch.full((2,), 2.0))
    assert len(said) == 1
    text = str(said[0].message)
    assert "Model.1 is not scheduled and runs in eager mode" in text
    assert "stage 'layers.1': no kernel for aten.odd" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(torch.ones(2))
    assert len(compiler.captures) == 1, "nor is it tried again"


def test_another_error_is_not_hidden() -> None:
    graph = captured(Compiler(ValueError("a bug of ours")))
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug of ours"):
            graph(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "an input has layout torch.sparse_coo"),
        (lambda: nn.Linear(1, 1), "an input is a Linear"),
        (lambda: 1j, "an input is a complex"),
    ],
    ids=["sparse", "object", "complex"],
)
def test_inputs_that_no_stage_can_take(make: Callable[[], Any], reason: str) -> None:
    graph = captured(Compiler())
    graph.module = fx.GraphModule(nn.Module(), identity())
    value = make()
    with pytest.warns(UserWarning, match=reason):
        assert graph(value)[0] is value


def test_an_unsupported_graph_is_not_tried_for_each_size() -> None:
    graph = captured(Compiler(UnsupportedGraphError("no kernel for aten.odd")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(2, 22):
            assert equal(graph(torch.ones(n))[0], torch.full((n,), 2.0))
    assert graph.made == 6  # the calls 1, 2, 3, 5, 9 and 17


def identity() -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    return graph


class Clamped(nn.Module):
    """Clamps its weight in the forward: a captured graph that changes a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)
        return F.mse_loss(self.second(F.gelu(self.first(x))), y)


def test_an_unsupported_model_has_the_plain_numbers() -> None:
    torch.manual_seed(0)
    plain, model = twins(Clamped())
    with pytest.warns(UserWarning, match="Clamped is not scheduled.*'second.weight'") as said:
        for _ in range(2):
            assert equal(step(plain, batch()), step(model, batch()))
    assert len([w for w in said if "megacompile" in str(w.message)]) == 1
    assert differences(plain, model) == []
    assert schedules(model) == []


# --- shapes


def test_sizes_that_cannot_be_symbols_have_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo makes the size dynamic the second time."""
    monkeypatch.setattr(compat, "described_inputs", lambda module: None)
    plain, model = twins(stack()[0])
    sizes = [4, 5, 6, 5]
    for size in sizes:
        inputs = batch(size=size)
        assert equal(step(plain, inputs), step(model, inputs))
    assert differences(plain, model) == []
    graphs = inside.streamed(model).graphs
    assert [len(graph.programs) for graph in graphs] == [1, 2]
    assert [graph.name for graph in graphs] == ["Stack", "Stack.1"]
    shown = [str(schedule) for schedule in schedules(model)]
    for size, code in zip((4, 5, 6), shown, strict=True):
        assert f"f32[{size}, 16]" in code


# --- hooks of the user around a call


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "save_on_cpu": lambda m, x: saved_on_cpu(m, x),
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
}


def saved_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        result: Tensor = model(x)
    return result


@pytest.mark.parametrize("kind", AROUND)
def test_hooks_on_saved_tensors_around_a_call(kind: str) -> None:
    """They are not the stages': what a stage saves is traced without them."""
    plain, model = twins(stack()[0])
    for each in (plain, model):
        x = batch()["x"].requires_grad_()
        each(AROUND[kind](each, x)).square().mean().backward()  # the first call is in there
        each.zero_grad()
        AROUND[kind](each, each(x)).square().mean().backward()
    assert differences(plain, model) == []
    assert schedules(model) != []


def test_hooks_on_saved_tensors_see_nothing_of_a_capture() -> None:
    """A checkpoint compares what is saved in both of its forwards; the first one is captured."""
    torch._dynamo.reset()
    plain, model, inputs = *twins(graph_break()[0]), graph_break()[1]
    for each in (plain, model):
        checkpoint(each, inputs["x"], inputs["y"], use_reentrant=False).backward()
    assert differences(plain, model) == []
