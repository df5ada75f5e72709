"""Parts with code that runs in the backward: hooks, and functions of autograd."""

from __future__ import annotations

import random
import textwrap
from typing import Any

from tests.frames.part import Part, drawn_break, module

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
