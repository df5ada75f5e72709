"""Parts with frames, and with Python objects that change; all kinds of parts."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable

from tests.frames import views
from tests.frames.views import Part, drawn_break, module


def helper(rng: random.Random) -> Part:
    """A function of the module with parameters as arguments, and locals that hold them."""
    widths = [rng.choice((2, 3, 5)) for _ in range(rng.choice((2, 3, 4)))]
    if same := rng.random() < 0.3:
        widths = [3] * len(widths)
    pick = rng.choice(("in a loop", "by an index", "as two locals"))
    where = rng.choice(("in the helper", "after the local"))
    name, line = drawn_break(rng, none=1)
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
    top = module(init, uses[pick], before=function)
    # Two graphs may read one parameter: docs/limits.md, "The order of additions".
    return Part(features, top=top, rounds=pick == "by an index" and name != "")


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

        def p0_other(self, x, k=0, t=None, **_):
            return self.head(self.first(x)).square().mean(), x * 1.0
    """
    before = """
        def p0_function(x):
            return torch.sin(x)
    """
    top = module("self.o = nn.Linear(4, 4)", "return p0_function(self.o(x))", before=before)
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
    "nested": 'self.nested["a"][0] is self.nested["b"][0]["w"] is w',
    "in a dict": "w in self.scales",
    "set here": "mark_p0(w) > 1",
    "requires_grad": "w.requires_grad and not self.f.requires_grad",
    "shape": "tuple(w.shape) == (4, 4)",
    "type module": 'type(w).__module__.startswith("torch.nn")',
    "type of data": "type(w.data) is torch.Tensor",
    "vars": '"tag" in vars(w)',
    "id": "id(w) in self.ids",
    "grad_fn": "w.grad_fn is None",
    "version": "w._version % 2 == 0",
    "copy": "copied_p0(w)",
    "hooks": "hooked_p0(self, w)",
    "requires_grad set": "thawed_p0(self.f)",
    "requires_grad set, and a gradient": "thawed_p0(self.f, torch.ones(4, 4, device=DEVICE))",
    "tied pointer": "w.data_ptr() == self.names[0].data_ptr()",
    "pointer": 'DEVICE != "cpu" or read_p0(self.f.data_ptr())',
    "storage": 'DEVICE != "cpu" or read_p0(self.f.untyped_storage().data_ptr())',
    "numpy": 'DEVICE != "cpu" or float(self.f.numpy()[0, 1]) > 0',
    "numpy written": 'DEVICE != "cpu" or written_p0(self.f)',
    "own class": "isinstance(self.own, Own_p0)",
    "own class name": 'self.own.__class__.__name__ == "Own_p0"',
    "own method": "self.own.scaled().detach().sum() > 0",
    "own property": "self.own.total.detach() > 0",
}


def asks(rng: random.Random) -> Part:
    """What code asks of a parameter in the forward."""
    kind, question = rng.choice(list(ASKS.items()))
    name, line = drawn_break(rng, none=3)
    where = rng.choice(("in the frame", "in a helper", "in eager code"))
    ask = {
        "in the frame": question,
        "in a helper": "asked_p0(self, w)",
        "in eager code": "eagerly(asked_p0, self, w)",
    }[where]
    before = f"""
        import ctypes


        class Own_p0(nn.Parameter):
            def scaled(self):
                return self * 2

            @property
            def total(self):
                return self.sum()


        def mark_p0(w):
            w.count = getattr(w, "count", 0) + 1
            return w.count


        def copied_p0(w):
            other = copy.copy(w)
            return other.requires_grad and other.is_leaf and isinstance(other, nn.Parameter)


        def triple_p0(w):
            w.grad.mul_(3)


        def hooked_p0(self, w):
            if not self.handles:
                self.handles += [w.register_hook(lambda g: g * 3)]
                self.handles += [w.register_post_accumulate_grad_hook(triple_p0)]
            return True


        def thawed_p0(f, grad=None):
            if grad is not None:
                f.grad = grad
            f.requires_grad = True
            return f.requires_grad


        def read_p0(address):
            return (ctypes.c_float * 4).from_address(address)[1] > 0


        def written_p0(f):
            f.detach().numpy()[0, 0] = 5.0
            return True


        def asked_p0(self, w):
            return {question}
    """
    init = """
        self.o = nn.Linear(4, 4)
        self.o.weight.tag = 2
        self.names, self.ids, self.handles = [self.o.weight], [id(self.o.weight)], []
        self.scales = {self.o.weight: 2.0}
        self.nested = {"a": (self.o.weight, 3), "b": [{"w": self.o.weight}]}
        self.f = nn.Parameter(torch.rand(4, 4), requires_grad=False)
        self.own = Own_p0(torch.ones(4))
    """
    forward = f"""
        w = self.o.weight
        {line}
        scale = 2.0 if {ask} else 0.5
        x = self.o(x) + x @ self.f + x @ self.nested["b"][0]["w"]
        return torch.tanh(x) * scale + self.own
    """
    stepped = 'see("p0 nested", model.p0.nested["a"][0] is model.p0.o.weight)'
    return Part((kind, where, name), top=module(init, forward, before=before), stepped=stepped)


KINDS: dict[str, Callable[[random.Random], Part]] = {
    "helper": helper,
    "hook in the forward": views.hook,
    "hook outside": views.outer_hook,
    "function": views.function,
    "kept view": views.kept_view,
    "kept input": views.kept_input,
    "alias": views.alias,
    "changed": views.changed,
    "exchanged": exchanged,
    "asks": asks,
}
