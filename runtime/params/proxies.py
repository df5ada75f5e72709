"""StreamedParameter: replaces a host parameter while the model runs.

Its `device` is the compute device, but it only references the host tensor. Under Dynamo it is an
ordinary graph input. In eager code (a graph break, a skipped frame) each operation on it fetches a
temporary copy: slow, but always correct. A resident parameter is read in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import BackwardError, ModelError
from megacompile.packed import is_wrapper, on_device, packed_parameters, taken_apart
from megacompile.runtime.device import ranks
from megacompile.runtime.params.guards import opened, unguarded_class
from megacompile.runtime.params.looks import ParameterLooks, Same, in_memory, link_of, parameter_of


def _nothing(*of_nothing: Any) -> None: ...


class ParamSource(NamedTuple):
    """The source of a proxy's data, and callbacks for uses by eager code."""

    # outside of a model, a proxy waits for nothing and notifies of nothing
    settle: Callable[[], None] = _nothing  # waits until the data may be read
    wrote: Callable[[], None] = _nothing  # called after a write by eager code
    used: Callable[[torch.Tensor | None, Any], None] = _nothing  # see `StreamedParameter.use`
    copy: torch.Tensor | None = None  # the tensor copied to the device instead of the parameter
    resident: bool = False  # True if the parameter lives on the device


_NO_MODEL = ParamSource()


class StreamedParameter(ParameterLooks, torch.Tensor):  # type: ignore[override]
    """A traceable wrapper: shape, strides and dtype of `host`, on `device`. Its own attributes are
    slots: its `__dict__` is the parameter's."""

    __slots__ = (
        *("host", "root", "param", "is_view", "source", "part"),
        *("base", "copied", "fetched_version", "_is_param", compat.STATIC_INPUT),
    )
    host: torch.Tensor
    root: torch.Tensor  # the host tensor of the parameter, or of the view's base
    param: Any  # the parameter, or a component of a packed one; None: outside of a model
    is_view: bool  # True for a view of a parameter, created by eager code
    source: ParamSource
    part: torch.Tensor | None  # if ranks share it: this rank's part; `host` is on meta
    base: StreamedParameter | None  # the view's base
    copied: torch.Tensor | None  # a copy on the device, for code that needs a pointer
    fetched_version: int  # version of `root` at the last fetch by a forward; -1: none
    _is_param: bool

    @staticmethod
    def __new__(
        cls, host: torch.Tensor, device: torch.device, view: bool = False
    ) -> StreamedParameter:
        self: StreamedParameter = compat.wrapper(cls, host, device)
        self.host = self.root = host
        self.param = self.part = self.base = self.copied = None
        self.is_view, self.fetched_version, self.source = view, -1, _NO_MODEL
        self._is_param = not view  # isinstance(self, nn.Parameter)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedParameter({self.host!r}, device={str(self.device)!r})"

    __hash__ = ParameterLooks.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy it like a parameter on the device; the copy stays there and is not streamed."""
        copy = self.detach().clone()
        made = copy if self.is_view else nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = made
        return made

    def _whole(self) -> torch.Tensor:
        return self.host if self.part is None else self.fetched()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the host tensor, during a forward (in a signal handler, for example)."""
        self.source.settle()
        return self._whole().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self._whole().tolist()

    def fetched(self) -> torch.Tensor:
        """A copy on the device. If ranks share the parameter, all of them call this."""
        if self.part is None:
            return self.host.to(self.device, copy=True)
        return ranks.whole(self.param, self.part.to(self.device))

    def use(self) -> None:
        """Record a use by eager code: its parameter, and the link for a backward; then wait until
        the data may be read."""
        link = link_of(self if self.base is None else self.base)
        # no link, if eager code has written to the proxy
        is_link = torch.is_grad_enabled() and type(link) is _LINK
        self.source.used(self.param, link if is_link else None)
        self.source.settle()

    def check_version(self) -> None:
        """Bump the proxy's version if the parameter was changed in place, because the proxy has its
        own version counter: autograd then raises if it has saved the proxy for a backward. Raises
        BackwardError: a backward would fetch other values than its forward did."""
        version, before = compat.version(self.root), self.fetched_version
        if before in (-1, version):
            self.fetched_version = version
        elif compat.backward_id() == -1:
            self.fetched_version = version
            torch.autograd.graph.increment_version(self)
        else:
            raise BackwardError(
                f"a parameter of shape {tuple(self.shape)} was changed in place since the forward, "
                "which used it in code that Dynamo did not capture, and the backward needs its "
                "old value; call backward() before optimizer.step()"
            )

    def outdated(self) -> bool:
        """True if the parameter was changed in place since a forward fetched it."""
        return self.fetched_version not in (-1, compat.version(self.root))

    def store(self, value: torch.Tensor) -> None:
        """Write a new value to the host; each of several ranks writes its part."""
        if self.part is None:
            self.host.copy_(value)
        else:
            self.part.copy_(compat.local(compat.distributed(value, self.param)))
        base = self if self.base is None else self.base
        if base.copied is not None:
            base.copied.copy_(base.fetched())

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's gradient on the device: a copy, unless the device is the host."""
        if self.param is None or self.is_view:
            return super().grad if super().is_leaf else None
        gradient = None if compat.is_described() else self.param.grad
        return None if gradient is None else as_gradient_of(self, gradient)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.param is None or self.is_view:
            torch.Tensor.grad.__set__(self, value)  # type: ignore[union-attr]
        else:
            self.param.grad = None if value is None else value.to(self.param.device)

    @property
    def data(self) -> torch.Tensor:
        """The values, like any tensor's; an assignment is written to the host."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ModelError(
                f"a parameter of shape {tuple(self.shape)} and {self.dtype} got data of shape "
                f"{tuple(value.shape)} and {value.dtype} in the forward; assign .data between "
                "calls"
            )
        with torch.no_grad():
            self.source.settle()
            self.store(value)
            self.source.wrote()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.device

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], device: torch.device, size: Any, stride: Any
    ) -> StreamedParameter:
        return cls(inner["host"], device)

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # otherwise Dynamo captures this code when it skips the caller
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if compat.returns_views(func):
            return _view(func, args, kwargs)
        changes = compat.is_mutable(func)

        def fetch(value: StreamedParameter) -> torch.Tensor:
            value.use()
            value.check_version()
            if changes or not value.source.resident or value.part is not None:
                return value.fetched()
            # another tensor object: cuDNN replaces the storage of flat weights
            there: torch.Tensor = torch.ops.aten.alias(value.host)
            return there

        def store(value: StreamedParameter, new: torch.Tensor) -> None:
            value.store(new)
            value.source.wrote()
            torch.autograd.graph.increment_version(value.root)  # for a pending backward

        if func is torch.ops.aten.eq.Tensor and parameter_of(args[0]) is parameter_of(args[1]):
            value = fetch(args[0] if isinstance(args[0], StreamedParameter) else args[1])
            return func(value, value).as_subclass(Same)
        return compat.call_with(func, args, kwargs, StreamedParameter, fetch, store)


class StreamedView(StreamedParameter):
    """The proxy of a plain tensor: a view of a parameter, or a component of a packed one."""

    __slots__ = ()
    stands_for = torch.Tensor


def _named(proxy: type[StreamedParameter]) -> type[StreamedParameter]:
    for name in ("__module__", "__name__", "__qualname__"):  # code reads `type(p).__name__`
        setattr(proxy, name, getattr(proxy.stands_for, name))
    return proxy


@functools.cache
def proxy_class(cls: type) -> type[StreamedParameter]:
    """The proxy class for a parameter class; `isinstance` agrees with the original. For a subclass,
    as in bitsandbytes, it has the subclass's methods and properties too."""
    cls = unguarded_class(cls)
    if cls is torch.Tensor:
        return StreamedView
    if cls is nn.Parameter or not issubclass(cls, nn.Parameter):
        return StreamedParameter
    content: dict[str, Any] = {"__slots__": (), "stands_for": cls}
    if cls.to is not torch.Tensor.to:
        content["to"] = torch.Tensor.to  # the same object if nothing changes
    return _named(type(cls.__name__, (StreamedParameter, cls), content))


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a proxy is a proxy of the view: writes through it reach the host. If ranks share
    the parameter, it is a view of a copy."""
    if any(isinstance(v, StreamedParameter) and v.part is not None for v in (*args, *kwargs)):
        return func(*compat.tree_map(_copied, args), **compat.tree_map(_copied, kwargs))
    bases: list[StreamedParameter] = []

    def host(value: Any) -> Any:
        if isinstance(value, StreamedParameter):
            bases.append(value)
        return value.host if isinstance(value, StreamedParameter) else value

    def proxy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        base = bases[0]
        view = StreamedView(value, base.device, view=True)
        view.base = base if base.base is None else base.base
        view.root, view.param, view.source = base.root, base.param, base.source
        if compat.backward_id() != -1:  # a view of what a forward has saved
            view.fetched_version = base.fetched_version
        return view

    args, kwargs = compat.map_values(host, func, (args, kwargs))
    return compat.map_values(proxy, func, func(*args, **kwargs))


def _copied(value: Any) -> Any:
    if isinstance(value, StreamedParameter):
        value.use()
        return value.fetched()
    return value


class Link(torch.autograd.Function):
    """Connects a proxy to its parameter: gradients from eager code are forwarded to the host."""

    @staticmethod
    def forward(
        ctx: Any, param: nn.Parameter, make: Callable[[], StreamedParameter]
    ) -> StreamedParameter:
        ctx.param = param
        ctx.links = None  # the machine's links, once eager code has used this one
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        param = ctx.param
        if ctx.links is not None and not compat.keeps_graph():
            ctx.links.discard(ctx)
        if gradient is None:
            return None, None
        if compat.is_sharded(param):
            return ranks.averaged(gradient, param), None
        return gradient.to(param.device), None


_LINK = compat.node_class(Link)


def as_gradient_of(proxy: StreamedParameter, gradient: torch.Tensor) -> torch.Tensor:
    """Convert a parameter's gradient to a gradient of its proxy."""
    if proxy.part is not None:
        return ranks.whole(proxy.param, compat.local(gradient).to(proxy.device))
    return gradient.to(proxy.device)


for _class in (StreamedParameter, StreamedView):
    _named(_class)
compat.ask_before_export(lambda tensor: in_memory(opened(tensor)))


# A parameter that is a wrapper subclass (torchao) has no storage. Its component tensors are in a
# bucket, and during a call a wrapper over their proxies replaces it.


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The component tensors of a wrapper; empty for any other tensor."""
    return taken_apart(tensor)[1] if is_wrapper(tensor) else []


def stand_in(
    param: torch.Tensor,
    device: torch.device,
    proxy_of: Callable[[torch.Tensor], StreamedParameter],
) -> torch.Tensor:
    """A wrapper like `param` over the proxies of its components, on the compute device. Raises
    ModelError: the parameter requires grad."""
    if param.requires_grad:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is a {type(param).__name__} that requires "
            "grad since megacompile(); needed a frozen one, because quantized data have no "
            "gradients; use requires_grad_(False) and train adapters (LoRA)"
        )
    wrapping, parts = taken_apart(param)
    made = on_device(wrapping, device)(*map(proxy_of, parts))
    made._is_param = True  # isinstance(made, nn.Parameter)
    return made


def follow_parts(model: nn.Module) -> None:
    """Set each wrapper's device to that of its components. Raises ModelError: other code references
    a wrapper, so torch cannot swap it."""
    for _, name, param in packed_parameters(model):
        if not is_wrapper(param):
            continue
        wrapping, parts = taken_apart(param)
        device = parts[0].device
        if param.device == device:
            continue
        there = nn.Parameter(on_device(wrapping, device)(*parts), requires_grad=False)
        try:
            torch.utils.swap_tensors(param, there)
        except RuntimeError as error:
            raise ModelError(
                f"parameter {name} ({type(param).__name__}) cannot move from {param.device} to "
                f"{device}: {error}; drop other references to the parameter, or move the model "
                "before megacompile()"
            ) from error
