"""The parts of a program: each is a few lines that a user could have written.

A part is made of source text. `p0` stands for its own name in it, which is a member of the model.
Its text depends on nothing but its kind and its seed: a program without another part has the same.
Here are those with views and aliases, changes in place, and code that runs in the backward.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass
from typing import Any

BREAKS = {  # what ends a captured graph
    "print": 'print(end="")',
    "graph_break": "torch._dynamo.graph_break()",
    "untraced call": "untraced()",
}


@dataclass(frozen=True)
class Part:
    """Lines of a program, by the place they belong to."""

    features: tuple[str, ...] = ()  # what was drawn
    top: str = ""  # of the module
    init: str = "self.p0 = P0()"  # in the model's `__init__`
    call: str = "x = self.p0(x, k, t)"  # in its `forward`
    inputs: str = ""  # another argument of the call
    methods: str = ""  # of the model's class
    prepare: str = ""  # before `megacompile()`; fills `kept`
    setup: str = ""  # after it
    ahead: str = ""  # of each forward, where `x` and `t` are made
    between: str = ""  # a forward and its backward, in the second step
    behind: str = ""  # each backward
    stepped: str = ""  # after each step of the optimizer
    end: str = ""
    rounds: bool = False  # may a gradient be summed in another order than in the plain program?


def module(init: str, forward: str, *, before: str = "", more: str = "") -> str:
    """The class of a part, after the lines that it needs."""
    init, forward, more = (textwrap.dedent(text).strip("\n") for text in (init, forward, more))
    lines = [
        textwrap.dedent(before).strip("\n") + "\n\n" if before else "",
        "class P0(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        textwrap.indent(init, " " * 8),
        "",
        "    def forward(self, x, k, t):",
        textwrap.indent(forward, " " * 8),
        "\n" + textwrap.indent(more, " " * 4) if more else "",
    ]
    return "\n".join(lines).strip("\n")


def drawn_break(rng: random.Random, none: int = 2) -> tuple[str, str]:
    """A name and a line; of `none` + 3 draws `none` have none."""
    return rng.choice([*BREAKS.items(), *[("", "pass")] * none])


def kept_view(rng: random.Random) -> Part:
    """A view that the module keeps."""
    name, line = drawn_break(rng)
    lazy = rng.random() < 0.5
    view, use = rng.choice(
        [
            ("self.o.weight.detach().t()", "x @ self.v"),
            ("self.o.weight.detach()[1:3]", "x @ self.v.t() @ self.v"),
            ("self.o.weight.data.view(-1)", "x * self.v[:4]"),
            ("self.o.weight.detach()", "F.linear(x, self.v)"),
            ("self.scale.view(2, 2)", "x * self.v.reshape(-1)"),
            ("self.scale[:2]", "x * self.v.mean()"),
        ]
    )
    init = f"""
        self.o = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))
        self.v = {"None" if lazy else view}
    """
    forward = f"""
        if self.v is None:
            self.v = {view}
        self.scale.mul_(0.9)
        {line}
        return torch.tanh(self.o(x)) + ({use})
    """
    of = "of a buffer" if "scale" in view else "of a parameter"
    features = (of, "made in the forward" if lazy else "made in __init__", name)
    return Part(features, top=module(init, forward), end='see("p0.v", model.p0.v)')


def kept_input(rng: random.Random) -> Part:
    """A view of an input or of a value that the next call reads."""
    view = rng.choice(("x.detach()[:2]", "x.detach().t()[0]", "self.o(x).detach()", "t[1:]"))
    line = rng.choice(list(BREAKS.values()) + ["pass"] * 3)
    forward = f"""
        y = torch.tanh(self.o(x))
        if self.last is not None:
            y = y + self.last.float().mean()
        {line}
        self.last = {view}
        return y
    """
    top = module("self.o = nn.Linear(4, 4)\nself.last = None", forward)
    return Part((view,), top=top, behind='see("p0.last", model.p0.last)')


def alias(rng: random.Random) -> Part:
    """Another name for parameters' memory, made before `megacompile()`."""
    kind, line = rng.choice(
        [
            ("state_dict", 'kept["p0"] = model.state_dict()["p0.o.weight"]'),
            ("detach", 'kept["p0"] = model.p0.o.weight.detach()'),
            ("data", 'kept["p0"] = model.p0.o.weight.data'),
            ("a view", 'kept["p0"] = model.p0.o.weight.detach()[1:].t()'),
            (
                "a flat buffer",
                'kept["p0"] = torch.zeros(20, device=DEVICE)\n'
                'kept["p0"][:16] = model.p0.o.weight.detach().view(-1)\n'
                'model.p0.o.weight.data = kept["p0"][:16].view(4, 4)',
            ),
            ("a buffer", 'kept["p0"] = model.p0.scale.view(2, 2)'),
        ]
    )
    writes = rng.random() < 0.3
    init = """
        self.o = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
    """
    forward = """
        self.scale.add_(1)
        return torch.tanh(self.o(x)) * self.scale
    """
    change = 'kept["p0"].mul_(0.5)' if writes else ""
    return Part(
        (kind, "written" if writes else "read"),
        top=module(init, forward),
        prepare=line,
        stepped=f'{change}\nsee("alias p0", kept["p0"])',
    )


READS = {  # what is changed: how the forward reads it (`t` is an input), and the change
    "input": ("t", "p0_z.mul_(0.5)"),
    "view of the input": ("t[:, 1:2]", "p0_z.mul_(0.5)"),
    "batch buffer": ("t", "p0_batch.zero_()"),
    "labels": ("t[1:].view(-1)", "p0_ids.zero_()"),
    "output": ("t", "y.detach().mul_(0.5)"),
    "buffer": ("self.scale", "model.p0.scale.mul_(0.5)"),
    "view of a buffer": ("self.scale.view(2, 2).t().flatten()", "model.p0.scale.mul_(0.5)"),
    "slice of a buffer": ("self.scale[1:2]", "model.p0.scale.mul_(0.5)"),
    "kept tensor": ("self.kept", "model.p0.kept.mul_(0.5)"),
    "view of a kept tensor": ("self.kept[1:2]", "model.p0.kept.mul_(0.5)"),
    "parameter": ("self.gain", "model.p0.gain.detach().mul_(0.5)"),
    "view of a parameter": ("self.gain[1:2]", "model.p0.gain.detach().mul_(0.5)"),
}
USES = {
    "product": "h * v",
    "function": "Times_p0.apply(h, v)",
    "matrix product": "h @ v.expand(len(x), 4).t() @ h",
    "sum": "h + v",
}
OF_LABELS = {  # whole numbers
    "product": "h + F.cross_entropy(h, v)",
    "function": "h + F.embedding(v, self.table)",
    "matrix product": "h + h.gather(1, v.unsqueeze(1))",
    "sum": "h + v.unsqueeze(1)",
}


def changed(rng: random.Random) -> Part:
    """A tensor that a forward read is changed in place before its backward."""
    name, line = drawn_break(rng, none=4)
    what, (read, between) = rng.choice(list(READS.items()))
    use = rng.choice(list(USES))
    before = """
        class Times_p0(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h, v):
                ctx.save_for_backward(v)
                return h * v

            @staticmethod
            def backward(ctx, g):
                (v,) = ctx.saved_tensors
                return g * v, None
    """
    init = """
        self.o = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))
        self.kept = torch.linspace(0.5, 1.5, 4, device=DEVICE)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.table = nn.Parameter(torch.randn(3, 4))
    """
    forward = f"""
        h = torch.sin(self.o(x))
        v = {read}
        {line}
        return {(OF_LABELS if what == "labels" else USES)[use]}
    """
    ahead = {
        "batch buffer": "p0_batch[: len(x)].copy_(x)\np0_z = p0_batch[: len(x)]",
        "labels": "p0_ids = torch.arange(len(x) + 1, device=DEVICE) % 3\np0_z = p0_ids",
    }.get(what, "p0_z = torch.randn(rows, 4).to(DEVICE)")
    return Part(
        (what, f"read by a {use}", name),
        top=module(init, forward, before=before),
        call="x = self.p0(x, k, p0_z)",
        inputs="p0_z",
        setup="p0_batch = torch.zeros(16, 4, device=DEVICE)" if what == "batch buffer" else "",
        ahead=ahead,
        between=between,
    )


WRITES = {  # what the backward does with a gradient `g`
    "adds to a buffer": "seen.add_(g.sum())",
    "overwrites a buffer": "seen.copy_(g.sum())",
    "multiplies a buffer": "seen.mul_(0.5)",
    "custom op": "note(seen, g.sum())",
}
SEEN = 'self.register_buffer("seen", torch.ones(()))'


def hook(rng: random.Random) -> Part:
    """`h.register_hook` in the forward."""
    name, line = drawn_break(rng)
    what, write = rng.choice(list(WRITES.items()))
    both = rng.random() < 0.3
    gives = rng.choice(("None", "g * 0.5"))
    kept = rng.random() < 0.3  # a tensor that is no buffer
    init = "self.o = nn.Linear(4, 4)\n" + (
        "self.seen = torch.ones((), device=DEVICE)" if kept else SEEN
    )
    forward = f"""
        h = torch.tanh(self.o(x))
        {"self.seen.add_(1)" if both else "pass"}
        {line}
        if h.requires_grad:
            h.register_hook(self.note)
        return h * 1.5
    """
    more = f"""
        def note(self, g):
            seen = self.seen
            {write}
            return {gives}
    """
    features = (what, name, "in both directions" if both else "", "a kept tensor" if kept else "")
    return Part(
        features, top=module(init, forward, more=more), behind='see("p0.seen", model.p0.seen)'
    )


def outer_hook(rng: random.Random) -> Part:
    """Hooks of modules and of parameters."""
    what, write = rng.choice(list(WRITES.items()))
    kind = rng.choice(
        ("full backward", "full backward pre", "parameter", "post accumulate", "forward")
    )
    early = rng.random() < 0.5
    register = {
        "full backward": "o.register_full_backward_hook(lambda m, _, g: write_p0(model, g[0]))",
        "full backward pre": (
            "o.register_full_backward_pre_hook(lambda m, g: write_p0(model, g[0]))"
        ),
        "parameter": "o.weight.register_hook(lambda g: write_p0(model, g))",
        "post accumulate": (
            "o.weight.register_post_accumulate_grad_hook(lambda p: write_p0(model, p.grad))"
        ),
        "forward": (
            "o.register_forward_hook("
            "lambda m, _, y: y.register_hook(lambda g: write_p0(model, g)) and None)"
        ),
    }[kind]
    register = f"model.p0.{register}"
    before = f"""
        def write_p0(model, g):
            seen = model.p0.seen
            {write}
    """
    top = module("self.o = nn.Linear(4, 4)\n" + SEEN, "return torch.tanh(self.o(x))", before=before)
    guard = "if model.p0.o.weight.requires_grad:\n    "
    lines: dict[str, Any] = {"prepare" if early else "setup": guard + register}
    features = (kind, what, "before megacompile" if early else "")
    return Part(features, top=top, behind='see("p0.seen", model.p0.seen)', **lines)


def function(rng: random.Random) -> Part:
    """An `autograd.Function` that writes in its backward, and may in its forward."""
    name, line = drawn_break(rng)
    what, write = rng.choice(list(WRITES.items()))
    kept = rng.choice(("a buffer", "a kept tensor", "saved"))
    both = rng.random() < 0.3 and kept != "saved"
    keep = (
        "ctx.save_for_backward(x, seen)"
        if kept == "saved"
        else "ctx.save_for_backward(x)\nctx.seen = seen"
    )
    get = (
        "x, seen = ctx.saved_tensors"
        if kept == "saved"
        else "(x,), seen = ctx.saved_tensors, ctx.seen"
    )
    before = f"""
        class Cube_p0(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, seen):
                {"seen.add_(x.detach().mean())" if both else "pass"}
{textwrap.indent(keep, " " * 16)}
                return x ** 3

            @staticmethod
            def backward(ctx, g):
                {get}
                {write}
                return 3 * x * x * g, None
    """
    init = "self.o = nn.Linear(4, 4)\n" + (
        "self.seen = torch.ones((), device=DEVICE)" if kept == "a kept tensor" else SEEN
    )
    forward = f"""
        h = torch.tanh(self.o(x))
        {line}
        return Cube_p0.apply(h, self.seen)
    """
    features = (what, kept, name, "in both directions" if both else "")
    top = module(init, forward, before=before)
    return Part(features, top=top, behind='see("p0.seen", model.p0.seen)')
