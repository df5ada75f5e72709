"""The idea of megacompile in one file: plain PyTorch and torch.fx, read from top to bottom.

    python examples/from_scratch.py

A small language model trains with its parameters, gradients and optimizer states in host memory.
The device has two buffers for parameters, and the activations between layers. Six steps do it:

1. capture    the model becomes one graph in which every parameter is an input
2. cut        the graph becomes a stage for each layer: a function without state
3. store      the parameters of each stage are in one flat buffer on the host: its bucket
4. schedule   a list of actions says when each bucket is copied and when each stage runs
5. run        three streams execute the list
6. update     the optimizer steps on the host

On the CPU, losses and parameters equal those of the plain model in every bit. The model here has no
buffers, and each parameter has one reader. megacompile adds the rest: any model, shapes and graph
breaks, plans that fill the memory, a proof that a schedule is free of races, updates that overlap,
autograd and optimizers as the user wrote them. docs/design.md says where it has each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 64, 32, 2, 4, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width)
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)  # (batch, heads, length, head width) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # int64 (batch, length)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# --- 1. capture: one graph, in which every parameter is an input


def capture(model: nn.Module, *args: Tensor) -> tuple[fx.Graph, dict[fx.Node, str]]:
    """The graph of a model's operators, and those of its inputs that are parameters, with their
    names. The model runs once, on tensors without data."""
    program = torch.export.export(model, args)
    names = program.graph_signature.inputs_to_parameters
    inputs = program.graph.find_nodes(op="placeholder")
    return program.graph, {node: names[node.name] for node in inputs if node.name in names}


# --- 2. cut: a stage for each layer, a function without state


@dataclass
class Stage:
    """A part of the graph as a function: of its parameters, then of values of other stages."""

    name: str
    params: list[str]
    args: list[str]  # names of values of other stages, or of inputs of the model
    results: list[str]
    code: Callable[..., Any]


def cut(graph: fx.Graph, params: dict[fx.Node, str]) -> list[Stage]:
    """Consecutive operators of one layer; those of no layer (the loss) join the stage before."""
    groups: list[tuple[str, list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack", {}).values()
            layer = next((path for path, _ in stack if path), "")  # the outermost: "blocks.1"
            if not groups or (layer and layer != groups[-1][0]):
                groups.append((layer, []))
            groups[-1][1].append(node)
    return [_stage(layer, nodes, params) for layer, nodes in groups]


def _stage(layer: str, nodes: list[fx.Node], params: dict[fx.Node, str]) -> Stage:
    inside = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    own, args = [n for n in read if n in params], [n for n in read if n not in params]
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (*own, *args)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    arg_names, result_names = ([node.name for node in each] for each in (args, results))
    code = fx.GraphModule({}, graph)
    return Stage(layer, [params[node] for node in own], arg_names, result_names, code)


# --- 3. store: parameters and gradients on the host, a flat buffer for each stage


class Bucket:
    """The parameters of a stage, and their gradients, in host memory. The model's own parameters
    are views of the buffers, so any optimizer can step on them."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.shapes = [p.shape for p in params]
        pin = DEVICE.type == "cuda"  # only copies of page-locked memory overlap computes
        numel = sum(p.numel() for p in params)
        self.flat, self.grads = (torch.zeros(numel, pin_memory=pin) for _ in range(2))
        values, grads = self.views(self.flat), self.views(self.grads)
        for param, value, grad in zip(params, values, grads, strict=True):
            value.copy_(param.data)
            param.data, param.grad = value, grad

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a buffer, or the beginning of a slot, into tensors of the parameters' shapes."""
        parts = flat[: self.flat.numel()].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


# --- 4. schedule: a list of actions


@dataclass(frozen=True)
class Action:
    """Copy bucket 2 into slot 0 (`2PREFETCH@0`) or its gradients to the host (`2OFFLOAD_GRAD`); run
    the forward (`2F`) or the backward (`2B`) of stage 2."""

    stage: int
    kind: str
    slot: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + (f"@{self.slot}" if self.kind == "PREFETCH" else "")


def schedule(count: int, slots: int = 2) -> list[Action]:
    """Forward, then backward. While a stage computes in one slot, the next bucket is copied into
    the other (the last stage's twice). A backward repeats its forward: only inputs are kept."""
    order = [(i, "F") for i in range(count)] + [(i, "B") for i in reversed(range(count))]
    actions = [Action(0, "PREFETCH", 0)]
    for k, (stage, kind) in enumerate(order):
        if k + 1 < len(order):
            actions.append(Action(order[k + 1][0], "PREFETCH", (k + 1) % slots))
        actions.append(Action(stage, kind, k % slots))
        if kind == "B":
            actions.append(Action(stage, "OFFLOAD_GRAD", k % slots))
    return actions


# --- 5. run: streams, and events where one waits for another


class Stream:
    """A queue of device work; without a GPU, work runs when it is queued."""

    def __init__(self, *, new: bool) -> None:
        stream = torch.cuda.Stream if new else torch.cuda.current_stream
        self.queue: Any = stream() if DEVICE.type == "cuda" else None

    def run(self, work: Callable[[], Any], *waits: Any) -> Any:
        """Queue work that waits for events; returns the event of its end (None: it has ended)."""
        if self.queue is None:
            return work()
        for event in filter(None, waits):
            self.queue.wait_event(event)
        with torch.cuda.stream(self.queue):
            work()
        return self.queue.record_event()


@dataclass
class Slot:
    """A buffer on the device for the parameters of any one stage."""

    flat: Tensor
    filled: Any = None  # event: the last copy into it, for the stage that reads it
    read: Any = None  # event: the last stage that read it, for the next copy into it


class Streamed:
    """A model on the CPU whose parameters are streamed through two slots."""

    def __init__(self, model: nn.Module, *args: Tensor) -> None:
        graph, names = capture(model, *args)
        inputs = graph.find_nodes(op="placeholder")
        self.inputs = [node.name for node in inputs if node not in names]
        self.stages = cut(graph, names)
        params = dict(model.named_parameters())
        self.buckets = [Bucket([params[name] for name in stage.params]) for stage in self.stages]
        self.actions = schedule(len(self.stages))
        numel = max(bucket.flat.numel() for bucket in self.buckets)
        self.slots = [Slot(torch.empty(numel, device=DEVICE)) for _ in range(2)]
        self.compute, self.h2d, self.d2h = (Stream(new=new) for new in (False, True, True))

    def step(self, *args: Tensor) -> Tensor:
        """Forward and backward; returns the loss. Replaces `p.grad`: no `zero_grad()` is needed."""
        loss = self.stages[-1].results[0]
        self.values = {n: a.to(DEVICE) for n, a in zip(self.inputs, args, strict=True)}
        self.tangents = {loss: torch.ones((), device=DEVICE)}  # gradients of values, by name
        self.grads: dict[int, list[Tensor]] = {}  # of parameters; alive until all are copied
        computed: Any = None  # event: the last compute
        for action in self.actions:
            stage, slot = action.stage, self.slots[action.slot]
            if action.kind == "PREFETCH":  # not before the slot's last reader is done
                slot.filled = self.h2d.run(partial(self._fetch, stage, slot), slot.read)
            elif action.kind == "OFFLOAD_GRAD":
                self.d2h.run(partial(self._offload, stage), computed)
            else:
                work = self._forward if action.kind == "F" else self._backward
                slot.read = computed = self.compute.run(partial(work, stage, slot), slot.filled)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # the optimizer reads gradients on the host
        return self.values[loss]

    def _fetch(self, index: int, slot: Slot) -> None:
        flat = self.buckets[index].flat
        slot.flat[: flat.numel()].copy_(flat, non_blocking=True)

    def _offload(self, index: int) -> None:
        bucket = self.buckets[index]
        for to, grad in zip(bucket.views(bucket.grads), self.grads[index], strict=True):
            to.copy_(grad, non_blocking=True)

    def _forward(self, index: int, slot: Slot) -> None:
        stage = self.stages[index]
        weights = self.buckets[index].views(slot.flat)
        with torch.no_grad():
            results = stage.code(*weights, *(self.values[name] for name in stage.args))
        self.values.update(zip(stage.results, results, strict=True))

    def _backward(self, index: int, slot: Slot) -> None:
        """Run the forward of a stage again, with autograd, and its backward."""
        stage, tangents = self.stages[index], self.tangents
        leaves = [w.detach().requires_grad_() for w in self.buckets[index].views(slot.flat)]
        args = {name: self.values[name].detach() for name in stage.args}
        floats = {n: arg.requires_grad_() for n, arg in args.items() if arg.is_floating_point()}
        results = stage.code(*leaves, *args.values())
        incoming = [tangents.pop(name) for name in stage.results]
        grads = torch.autograd.grad(results, [*leaves, *floats.values()], incoming)
        self.grads[index] = list(grads[: len(leaves)])
        for name, grad in zip(floats, grads[len(leaves) :], strict=True):  # several may read it
            tangents[name] = tangents[name] + grad if name in tangents else grad


# --- 6. update: the optimizer steps on the host


def batch(seed: int) -> tuple[Tensor, Tensor]:  # ids and targets
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=random)
    return ids, ids.roll(-1, 1)


def main() -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    plain.load_state_dict(model.state_dict())
    streamed = Streamed(model, *batch(0))
    print("stages:", ", ".join(f"{i} {s.name}" for i, s in enumerate(streamed.stages)))
    print("schedule:", *streamed.actions)
    plain.to(DEVICE)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for i in range(4):
        loss = streamed.step(*batch(i))
        ours.step()  # the parameters are views of the buckets: the next step streams new values
        expected = plain(*(each.to(DEVICE) for each in batch(i)))
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        print(f"step {i}: loss {loss.item():.6f} streamed, {expected.item():.6f} plain")
        if DEVICE.type == "cpu":  # elsewhere the optimizers of host and device round differently
            assert torch.equal(loss, expected)
            assert all(map(torch.equal, model.parameters(), plain.parameters()))


if __name__ == "__main__":
    main()
