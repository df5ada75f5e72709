"""StreamedParameter: stands in for a host parameter while the model runs.

It says that it is on the compute device, but holds only a reference to the host tensor. Under
Dynamo it is an ordinary graph input. In eager code (a graph break, a skipped frame) any operation
on it fetches a copy for its own duration: slow, never wrong.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.runtime.params.undo import Undos, exchange, undone, use_unguarded


class StreamedParameter(torch.Tensor):
    """A traceable wrapper: shape, strides and dtype of `host`, on `device`."""

    host: torch.Tensor
    root: torch.Tensor  # the host tensor of the parameter that it is, or is a view of
    param: nn.Parameter | None  # that parameter
    is_view: bool  # of a parameter, made by eager code
    tell: Callable[[], None]  # called where eager code uses it
    settle: Callable[[], None]  # waits until `host` may be read
    wrote: Callable[[], None]  # called when eager code has written to `host`

    @staticmethod
    def __new__(
        cls, host: torch.Tensor, device: torch.device, *, view: bool = False
    ) -> StreamedParameter:
        self: StreamedParameter = compat.wrapper(cls, host, device)
        self.host = self.root = host
        self.param = None
        self.is_view = view
        self.tell = self.settle = self.wrote = _nothing
        self._is_param = not view  # isinstance(self, nn.Parameter)
        return self

    def __init__(self, host: torch.Tensor, device: torch.device, *, view: bool = False) -> None:
        del host, device, view

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"{type(self).__name__}({self.host!r}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """As of a parameter on the device: a copy there, that nobody streams."""
        copy = self.detach().clone()
        made = copy if self.is_view else nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled in the middle of a forward (by a signal handler, say): the host tensor."""
        self.settle()
        return self.host.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As the parameter, though a link joins them.

        What Dynamo makes of inputs that are no leaves is never freed (seen on torch 2.13).
        """
        return super().is_leaf if self.param is None or self.is_view else True

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """As of a leaf: torch would not say it of another tensor."""
        like_a_leaf = self.param is not None and not self.is_view
        return self.dtype if like_a_leaf else super().grad_dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        _SET_GRAD_DTYPE(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's, on the device: a copy, where that is not the host."""
        if self.param is None or self.is_view:
            return super().grad if super().is_leaf else None
        gradient = None if compat.is_described() else self.param.grad
        return None if gradient is None else gradient.to(self.device)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.param is None or self.is_view:
            _SET_GRAD(self, value)
        else:
            self.param.grad = None if value is None else value.to(self.param.device)

    def requires_grad_(self, requires_grad: bool = True) -> StreamedParameter:
        """Freeze or train the parameter, from the next use on."""
        if self.param is None or self.is_view:
            super().requires_grad_(requires_grad)
        else:
            self.param.requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; what is assigned to it goes to the host."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ModelError(
                f"a parameter of shape {tuple(self.shape)} and {self.dtype} got data of shape "
                f"{tuple(value.shape)} and {value.dtype} in the forward; do that between calls"
            )
        with torch.no_grad():
            self.settle()
            self.host.copy_(value)
            self.wrote()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, size: Any, stride: Any
    ) -> StreamedParameter:
        del size, stride
        return StreamedParameter(inner["host"], device)

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # Dynamo, where it skips the caller, would capture this very code
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if compat.gives_views(func):
            return _view(func, args, kwargs)
        fetched: dict[int, tuple[StreamedParameter, torch.Tensor]] = {}

        def fetch(value: Any) -> Any:
            if not isinstance(value, StreamedParameter):
                return value
            if id(value) not in fetched:
                value.tell()
                value.settle()
                fetched[id(value)] = (value, value.host.to(value.device, copy=True))
            return fetched[id(value)][1]

        given, given_kwargs = compat.tree_map(fetch, (args, kwargs))
        result = func(*given, **given_kwargs)
        if compat.is_mutable(func):  # in-place on a parameter: the host tensor is the parameter
            for value in compat.written(func, args, kwargs):
                if isinstance(value, StreamedParameter):
                    value.host.copy_(fetched[id(value)][1])
                    value.wrote()
                    torch.autograd.graph.increment_version(value.root)  # for a pending backward
            back = {id(copy): proxy for proxy, copy in fetched.values()}
            result = compat.tree_map(lambda value: back.get(id(value), value), result)
        return result


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a proxy is a proxy of the view: what is written through it reaches the host."""
    bases: list[StreamedParameter] = []

    def host(value: Any) -> Any:
        if not isinstance(value, StreamedParameter):
            return value
        bases.append(value)
        return value.host

    def proxy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        view = StreamedParameter(value, bases[0].device, view=True)
        base = bases[0]
        view.root, view.param, view.tell = base.root, base.param, base.tell
        view.settle, view.wrote = base.settle, base.wrote
        return view

    args, kwargs = compat.tree_map(host, (args, kwargs))
    return compat.tree_map(proxy, func(*args, **kwargs))


_GRAD: Any = torch.Tensor.grad
_SET_GRAD: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__
_GRAD_DTYPE: Any = torch.Tensor.grad_dtype
_SET_GRAD_DTYPE: Callable[[torch.Tensor, torch.dtype | None], None] = _GRAD_DTYPE.__set__


def _nothing() -> None:
    """What a proxy of no model tells."""


class _EagerNotice:
    """Says once, with the place, that code of the user's runs in eager mode."""

    def __init__(self) -> None:
        self.said = False
        self.used = False  # by eager code, or an unknown caller

    def __call__(self) -> None:
        self.used = True
        if self.said or compat.backward_id() != -1:  # a backward is where its forward was
            return
        place = _place_in_user_code()
        if place is not None:
            self.said = True
            warnings.warn(
                f"megacompile: {place} runs in eager mode and fetches each parameter at each use "
                "(slower, same numbers; said once): Dynamo did not capture it, and "
                "TORCH_LOGS=graph_breaks says why",
                stacklevel=2,
            )


def _place_in_user_code() -> str | None:
    """The innermost line that is not ours or torch's; None in a captured graph or in Dynamo."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if compat.is_of_capture(frame):
            return None
        if module.partition(".")[0] not in ("torch", "megacompile"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return None


class Source(NamedTuple):
    """Where the data of a parameter comes from."""

    copy: torch.Tensor | None  # what goes to the device instead of the parameter
    settle: Callable[[], None]  # waits until it may be read
    wrote: Callable[[], None]  # called when eager code has written to it


class Site(NamedTuple):
    """A parameter where a module has it."""

    holder: dict[str, Any]  # the module's `_parameters`
    name: str
    param: nn.Parameter
    proxy: StreamedParameter


class Proxies:
    """The proxies of a model's parameters, and the swap."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        source: Callable[[nn.Parameter], Source | None] = lambda param: None,
    ) -> None:
        """The proxies of `model`.

        `source` says what is streamed for a parameter, where that is not the parameter itself.
        """
        self.device = device
        self.source = source
        self.notice = _EagerNotice()
        self.sites: list[Site] = []
        self._made: dict[int, StreamedParameter] = {}  # by the parameter's id
        for holder, name, param in _parameters(model):
            if id(param) not in self._made:
                self._made[id(param)] = self._proxy_of(param)
            self.sites.append(Site(holder, name, param, self._made[id(param)]))
        self._keys = [(id(holder), name, id(param)) for holder, name, param, _ in self.sites]
        self._columns = self._by_column()

    def _by_column(self) -> tuple[tuple[Any, ...], ...]:
        """Holders, names, parameters and proxies."""
        return tuple(zip(*self.sites, strict=True)) or ((),) * len(Site._fields)

    def _proxy_of(self, param: nn.Parameter) -> StreamedParameter:
        proxy = _make(param, self.device, self.source(param))
        proxy.tell = self.notice
        return proxy

    def fits(self, model: nn.Module) -> bool:
        """Do the same modules have the same parameters, by the same names, as when these were made?

        Not so behind a rename (pruning, a parametrization), or where another module has a parameter
        now (an adapter around its layer, a conversion): its old holder is not called any more.
        """
        now = [(id(holder), name, id(param)) for holder, name, param in _parameters(model)]
        return now == self._keys

    def pairs(self) -> Sequence[tuple[nn.Parameter, StreamedParameter]]:
        return [(site.param, site.proxy) for site in self.sites]

    def of(self, param: torch.Tensor) -> StreamedParameter | None:
        """The proxy of a parameter; None for any other tensor."""
        return self._made.get(id(param))

    def forget(self) -> None:
        """Refer to no parameter any more."""
        self.sites.clear()
        self._made.clear()
        self._keys.clear()
        self._columns = ((),) * len(Site._fields)

    def swap_in(self, undos: Undos) -> None:
        """Until the undos run, the model's parameters are the proxies."""
        undone(self._follow)
        undos.append(self.put_back)
        holders, names, params, proxies = self._columns
        exchange(holders, names, params, proxies)

    def _follow(self, undos: Undos) -> None:
        """Make the proxies anew of parameters that were frozen, or trained, since.

        Where eager code uses proxies, each call gets its own: the links of several calls would
        otherwise be one, and autograd would add their gradients in another order.
        """
        use_unguarded(undos)
        used = self.notice.used
        stale = {
            id(site.param): site.param
            for site in self.sites
            if used or site.proxy.requires_grad != site.param.requires_grad
        }
        if stale:
            self._made |= {key: self._proxy_of(param) for key, param in stale.items()}
            self.sites = [site._replace(proxy=self._made[id(site.param)]) for site in self.sites]
            self._columns = self._by_column()

    def put_back(self) -> None:
        """The model's parameters are themselves again, where the forward did not replace them."""
        holders, names, params, proxies = self._columns
        exchange(holders, names, proxies, params)

    def stand_ins(self, model: nn.Module) -> StandIns:
        """What takes the place of parameters for the time of a `torch.func.functional_call`."""
        known = {(id(site.holder), site.name): site.param for site in self.sites}
        given = compat.given_to_functional_call()
        found = [
            (holder, name, known.get((id(holder), name)), value)
            for holder, name, value in _parameters(model)
            if not isinstance(value, nn.Parameter) or id(value) in given
        ]
        return StandIns([each for each in found if each[2] is not each[3]])


class StandIns:
    """Tensors that are where the parameters of a model were: (holder, name, parameter, tensor).

    They may depend on parameters, so they are inputs of the call like any other, in no bucket.
    """

    def __init__(
        self, sites: Sequence[tuple[dict[str, Any], str, nn.Parameter | None, torch.Tensor]] = ()
    ) -> None:
        self.sites = sites
        self._holders = [holder for holder, _, _, _ in sites]
        self._names = [name for _, name, _, _ in sites]
        self._params = [param for _, _, param, _ in sites]
        self._tensors = [tensor for _, _, _, tensor in sites]

    def take_out(self, undos: Undos) -> None:
        """Until the undos run, the parameters are in their places again."""
        undos.append(partial(exchange, self._holders, self._names, self._params, self._tensors))
        exchange(self._holders, self._names, self._tensors, self._params)

    def put_in(self, place: Callable[[torch.Tensor], torch.Tensor], undos: Undos) -> None:
        """Until the undos run, what `place` gives for the tensors is where the parameters are."""
        placed: dict[int, torch.Tensor] = {}
        for tensor in self._tensors:
            if id(tensor) not in placed:
                placed[id(tensor)] = place(tensor)
        inside = [placed[id(tensor)] for tensor in self._tensors]
        undos.append(partial(exchange, self._holders, self._names, inside, self._params))
        exchange(self._holders, self._names, self._params, inside)


def _parameters(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Every parameter in every place that it has, with the dict that holds it there."""
    for module in model.modules():
        for name, param in compat.parameters_of(module).items():
            if param is not None:
                yield compat.parameters_of(module), name, param


class Link(torch.autograd.Function):
    """Joins a proxy to its parameter: what eager code adds to its gradient goes on to the host."""

    @staticmethod
    def forward(
        ctx: Any, param: nn.Parameter, make: Callable[[], StreamedParameter]
    ) -> StreamedParameter:
        ctx.param = param
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None if gradient is None else gradient.to(ctx.param.device), None


def _make(param: nn.Parameter, device: torch.device, source: Source | None) -> StreamedParameter:
    def make() -> StreamedParameter:
        root = param.detach()
        copy = None if source is None else source.copy
        proxy = StreamedParameter(root if copy is None else copy, device)
        proxy.root, proxy.param = root, param
        if source is not None:
            proxy.settle, proxy.wrote = source.settle, source.wrote
        return proxy

    if not param.requires_grad:
        return make()
    with torch.enable_grad():
        linked: StreamedParameter = Link.apply(param, make)  # type: ignore[no-untyped-call]
    assert linked.grad_fn is not None
    compat.run_soon(linked.grad_fn)
    return linked
