"""Parts with views and aliases, and with changes in place."""

from __future__ import annotations

import random

from tests.frames.part import BREAKS, Part, drawn_break, module


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
