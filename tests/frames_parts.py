"""The parts of programs of frames: each is a few lines that a user could have written.

A part is made of source text. `p0` stands for its own name in it, which is a member of the model.
Its text depends on nothing but its kind and its seed: a program without another part has the same.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

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
    methods: str = ""  # of the model's class
    prepare: str = ""  # before `megacompile()`; fills `kept`
    setup: str = ""  # after it
    optimizer: str = ""  # may wrap `optimizer`
    ahead: str = ""  # of each forward, where `x` and `t` are made
    between: str = ""  # a forward and its backward, in the second step
    behind: str = ""  # each backward
    stepped: str = ""  # after each step of the optimizer
    end: str = ""


def _module(init: str, forward: str, *, before: str = "", more: str = "") -> str:
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


def _break(rng: random.Random, none: int = 2) -> tuple[str, str]:
    """A name and a line; of `none` + 3 draws `none` have none."""
    return rng.choice([*BREAKS.items(), *[("", "pass")] * none])


def helper(rng: random.Random) -> Part:
    """A function of the module with parameters as arguments, and locals that hold them."""
    widths = [rng.choice((2, 3, 5)) for _ in range(rng.choice((2, 3, 4)))]
    if same := rng.random() < 0.3:
        widths = [3] * len(widths)
    pick = rng.choice(("in a loop", "by an index", "as two locals"))
    where = rng.choice(("in the helper", "after the local"))
    name, line = _break(rng, none=1)
    inner, outer = (line, "pass") if where == "in the helper" else ("pass", line)
    uses = {
        "in a loop": f"""
            for w in self.ws:
                {outer}
                x = x + mix_p0(x, w)
            return x
        """,
        "by an index": f"""
            w = self.ws[k % {len(widths)}]
            {outer}
            x = x + mix_p0(x, w)
            return x + mix_p0(x, self.ws[0])
        """,
        "as two locals": f"""
            first, last = self.ws[0], self.ws[-1]
            {outer}
            x = x + mix_p0(x, first)
            return x + mix_p0(x, last)
        """,
    }
    function = f"""
        def mix_p0(x, w):
            {inner}
            return torch.tanh(x @ w) @ w.t()
    """
    init = f"""
        widths = {tuple(widths)}
        self.ws = nn.ParameterList(nn.Parameter(torch.randn(4, n) / 4) for n in widths)
    """
    features = (pick, f"{name} {where}" if name else "", "one shape" if same else "several shapes")
    return Part(features, top=_module(init, uses[pick], before=function))


# Code that runs in the backward.

WRITES = {  # what the backward does with a gradient `g`
    "adds to a buffer": "seen.add_(g.sum())",
    "overwrites a buffer": "seen.copy_(g.sum())",
    "multiplies a buffer": "seen.mul_(0.5)",
    "custom op": "note(seen, g.sum())",
}
SEEN = 'self.register_buffer("seen", torch.ones(()))'


def hook(rng: random.Random) -> Part:
    """`h.register_hook` in the forward."""
    name, line = _break(rng)
    what, write = rng.choice(list(WRITES.items()))
    both = rng.random() < 0.3
    gives = rng.choice(("None", "g * 0.5"))
    kept = rng.random() < 0.3  # a tensor that is no buffer
    init = "self.o = nn.Linear(4, 4)\n" + ("self.seen = torch.ones((), device=DEVICE)" if kept else SEEN)
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
    return Part(features, top=_module(init, forward, more=more), behind='see("p0.seen", model.p0.seen)')


def outer_hook(rng: random.Random) -> Part:
    """Hooks of modules and of parameters."""
    what, write = rng.choice(list(WRITES.items()))
    kind = rng.choice(("full backward", "full backward pre", "parameter", "post accumulate", "forward"))
    early = rng.random() < 0.5
    register = {
        "full backward": "model.p0.o.register_full_backward_hook(lambda m, _, g: write_p0(model, g[0]))",
        "full backward pre": "model.p0.o.register_full_backward_pre_hook(lambda m, g: write_p0(model, g[0]))",
        "parameter": "model.p0.o.weight.register_hook(lambda g: write_p0(model, g))",
        "post accumulate": (
            "model.p0.o.weight.register_post_accumulate_grad_hook(lambda p: write_p0(model, p.grad))"
        ),
        "forward": (
            "model.p0.o.register_forward_hook("
            "lambda m, _, y: y.register_hook(lambda g: write_p0(model, g)) and None)"
        ),
    }[kind]
    trained = "model.p0.o.weight.requires_grad" in register
    before = f"""
        def write_p0(model, g):
            seen = model.p0.seen
            {write}
    """
    top = _module("self.o = nn.Linear(4, 4)\n" + SEEN, "return torch.tanh(self.o(x))", before=before)
    guard = "" if trained else "if model.p0.o.weight.requires_grad:\n    "
    lines = {"prepare" if early else "setup": guard + register}
    features = (kind, what, "before megacompile" if early else "")
    return Part(features, top=top, behind='see("p0.seen", model.p0.seen)', **lines)


def function(rng: random.Random) -> Part:
    """An `autograd.Function` that writes in its backward, and may in its forward."""
    name, line = _break(rng)
    what, write = rng.choice(list(WRITES.items()))
    kept = rng.choice(("a buffer", "a kept tensor", "saved"))
    both = rng.random() < 0.3 and kept != "saved"
    keep = "ctx.save_for_backward(x, seen)" if kept == "saved" else "ctx.save_for_backward(x)\nctx.seen = seen"
    get = "x, seen = ctx.saved_tensors" if kept == "saved" else "(x,), seen = ctx.saved_tensors, ctx.seen"
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
    top = _module(init, forward, before=before)
    return Part(features, top=top, behind='see("p0.seen", model.p0.seen)')


# Views and aliases.


def kept_view(rng: random.Random) -> Part:
    """A view that the module keeps."""
    name, line = _break(rng)
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
    return Part(features, top=_module(init, forward), end='see("p0.v", model.p0.v)')


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
    top = _module("self.o = nn.Linear(4, 4)\nself.last = None", forward)
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
        top=_module(init, forward),
        prepare=line,
        stepped=f'{change}\nsee("alias p0", kept["p0"])',
    )


def changed(rng: random.Random) -> Part:
    """What a forward read is changed in place before its backward."""
    name, line = _break(rng, none=4)
    what = rng.choice(
        ("input", "batch buffer", "labels", "output", "buffer", "view of a buffer", "parameter")
        + ("view of a parameter", "view of the input")
    )
    saved = rng.choice(("product", "function", "sum"))
    read = {
        "labels": "t[1:].view(-1).float().unsqueeze(1)",
        "buffer": "self.scale",
        "view of a buffer": "self.scale.view(2, 2).reshape(-1)",
        "parameter": "self.gain",
        "view of a parameter": "self.gain.view(2, 2).t().flatten()",
        "view of the input": "t[:, 1:2]",
    }.get(what, "t")
    uses = {
        "product": "h * v",
        "function": "Times_p0.apply(h, v)",
        "sum": "h + v",
    }
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
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
    """
    forward = f"""
        h = torch.sin(self.o(x))
        v = {read}
        {line}
        return {uses[saved]}
    """
    between = {
        "input": "x.mul_(0.5)",
        "batch buffer": "p0_batch.zero_()",
        "labels": "p0_ids.zero_()",
        "output": "y.detach().mul_(0.5)",
        "buffer": "model.p0.scale.mul_(0.5)",
        "view of a buffer": "model.p0.scale.mul_(0.5)",
        "parameter": "model.p0.gain.detach().mul_(0.5)",
        "view of a parameter": "model.p0.gain.detach().mul_(0.5)",
        "view of the input": "x.mul_(0.5)",
    }[what]
    ahead = {
        "batch buffer": "p0_batch[: len(x)].copy_(x)\nx = p0_batch[: len(x)]",
        "labels": "p0_ids = torch.arange(len(x) + 1, device=DEVICE) % 3\nt = p0_ids",
    }.get(what, "")
    setup = "p0_batch = torch.zeros(16, 4, device=DEVICE)" if what == "batch buffer" else ""
    given = "t" if what == "labels" else "x0"
    return Part(
        (what, f"read by a {saved}", name),
        top=_module(init, forward, before=before),
        call=f"x = self.p0(x, k, {given})",
        setup=setup,
        ahead=ahead,
        between=between,
    )


# The model as a Python object.


def exchanged(rng: random.Random) -> Part:
    """Another object, method or attribute after the first step."""
    kind, line = rng.choice(
        [
            ("copy.copy", "model = copy.copy(model)\nmodel.p0_scale = 0.5"),
            ("method of the class", "type(model).p0_mid = lambda self, x: x * 0.25"),
            ("method of the object", "model.p0_mid = lambda x: x * 0.25"),
            ("forward of the class", "type(model).forward = type(model).p0_other"),
            ("forward of the object", "model.forward = model.p0_other"),
            ("forward of a part", "model.p0.forward = lambda x, k, t: x * 0.25"),
            ("attribute", "model.p0_scale = 0.5"),
            ("function of the module", "global p0_function\np0_function = torch.cos"),
        ]
    )
    methods = """
        def p0_mid(self, x):
            return x * 1.5

        def p0_other(self, x, k=0, t=None):
            return self.head(self.first(x)).square().mean(), x * 1.0
    """
    before = """
        def p0_function(x):
            return torch.sin(x)
    """
    top = _module("self.o = nn.Linear(4, 4)", "return p0_function(self.o(x))", before=before)
    call = "x = self.p0_mid(self.p0(x, k, t)) * self.p0_scale"
    if line.startswith("global"):
        top += "\n\n\ndef p0_exchange():\n" + textwrap.indent(line, "    ")
        line = "p0_exchange()"
    return Part(
        (kind,),
        top=top,
        init="self.p0 = P0()\nself.p0_scale = 1.0",
        call=call,
        methods=textwrap.dedent(methods).strip("\n"),
        stepped="if step == 0:\n" + textwrap.indent(line, "    "),
    )


ASKS = {  # of a parameter `w`
    "type is": "type(w) is nn.Parameter",
    "class name": 'w.__class__.__name__ == "Parameter"',
    "type name": 'type(w).__name__ == "Parameter"',
    "isinstance": "isinstance(w, nn.Parameter)",
    "is_leaf": "w.is_leaf",
    "grad": "w.grad is None",
    "attribute": 'getattr(w, "tag", 1) == 2',
    "identity": "self.names[0] is w",
    "in a dict": "w in self.scales",
    "set here": "mark_p0(w) > 1",
    "requires_grad": "w.requires_grad",
    "shape": "tuple(w.shape) == (4, 4)",
}


def asks(rng: random.Random) -> Part:
    """What code asks of a parameter in the forward."""
    kind, question = rng.choice(list(ASKS.items()))
    name, line = _break(rng, none=3)
    where = rng.choice(("in the frame", "in a helper", "in eager code"))
    ask = {
        "in the frame": question,
        "in a helper": "asked_p0(self, w)",
        "in eager code": "eagerly(asked_p0, self, w)",
    }[where]
    before = f"""
        def mark_p0(w):
            w.count = getattr(w, "count", 0) + 1
            return w.count


        def asked_p0(self, w):
            return {question}
    """
    init = """
        self.o = nn.Linear(4, 4)
        self.o.weight.tag = 2
        self.names = [self.o.weight]
        self.scales = {self.o.weight: 2.0}
    """
    forward = f"""
        w = self.o.weight
        {line}
        scale = 2.0 if {ask} else 0.5
        return torch.tanh(self.o(x)) * scale
    """
    return Part((kind, where, name), top=_module(init, forward, before=before))


# The optimizer.

LOOKAHEAD = """
class P0Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = collections.defaultdict(dict)
        {hooks}

    def step(self, closure=None):
        loss = self.base.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
"""


def optimizer(rng: random.Random) -> Part:
    """A wrapper that does not call `Optimizer.__init__`; states that are saved and loaded."""
    kind = rng.choice(("wrapper", "wrapper with dicts", "states", "new optimizer", "states of a wrapper"))
    top = _module("self.o = nn.Linear(4, 4)", "return torch.tanh(self.o(x))")
    wraps = "wrapper" in kind
    hooks = "self._optimizer_step_pre_hooks = {}\n        self._optimizer_step_post_hooks = {}"
    if wraps:
        top += "\n\n" + LOOKAHEAD.format(hooks=hooks if kind == "wrapper with dicts" else "pass")
    trip = "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"
    if kind == "new optimizer":
        trip = "states = optimizer.state_dict()\noptimizer = make_optimizer(model)\noptimizer.load_state_dict(states)"
    stepped = "" if kind.startswith("wrapper") else "if step == 0:\n" + textwrap.indent(trip, "    ")
    return Part((kind,), top=top, optimizer="optimizer = P0Lookahead(optimizer)" if wraps else "", stepped=stepped)


KINDS: dict[str, Callable[[random.Random], Part]] = {
    "helper": helper,
    "hook in the forward": hook,
    "hook outside": outer_hook,
    "function": function,
    "kept view": kept_view,
    "kept input": kept_input,
    "alias": alias,
    "changed": changed,
    "exchanged": exchanged,
    "asks": asks,
    "optimizer": optimizer,
}
