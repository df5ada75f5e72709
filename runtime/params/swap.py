"""The swap: replaces a model's parameters by their proxies for a call."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat
from megacompile.packed import any_packed, is_wrapper, members
from megacompile.runtime.params.eager_notice import EagerNotice
from megacompile.runtime.params.looks import IS_TRAINED, is_trained, link_of
from megacompile.runtime.params.proxies import (
    Link,
    ParamSource,
    StreamedParameter,
    parts_of,
    proxy_class,
    stand_in,
)
from megacompile.runtime.params.undo import Undos, exchange, replace, undone, use_unguarded


class Site(NamedTuple):
    """A parameter in a module, or a tensor in the state of a packed parameter."""

    holder: dict[str, Any]  # the module's `_parameters`, or the state's `__dict__`
    name: str
    param: torch.Tensor
    proxy: torch.Tensor  # or a wrapper over proxies


class Proxies:
    """The proxies of a model's parameters; swaps them in.

    `ModelBuckets` keeps it until the model gets other parameters or their AccumulateGrad nodes
    change.

    Args:
        device: that computes.
        source: returns a parameter's `Source`.
        notice: records uses by eager code.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        source: Callable[[torch.Tensor], ParamSource],
        notice: EagerNotice,
    ) -> None:
        self.device = device
        self.source = source
        self.notice = notice
        self.are_in = False  # compares the parameters' places
        self._found: tuple[list[Any], ...] = ()
        self.sites: list[Site] = []
        self._made: dict[int, StreamedParameter] = {}  # by leaf id
        self._stand_ins: dict[int, torch.Tensor] = {}  # for wrappers, by id
        places = list(_places(model))
        for holder, name, param, leaf in places:
            self.sites.append(Site(holder, name, param, self._in_place_of(param, leaf)))
        modules = compat.modules_of(model)
        self._found = _found(model, modules)
        self._containers = Containers(modules, self.of)
        self._columns = self._by_column()

    def _by_column(self) -> tuple[tuple[Any, ...], ...]:
        """Holders, names, parameters and proxies."""
        proxies = {id(s.proxy): s.proxy for s in self.sites}
        self._pairs: list[tuple[Any, Any]] = [
            (proxy, proxy.param)
            for proxy in proxies.values()
            if isinstance(proxy, StreamedParameter)
        ]
        return tuple(zip(*self.sites, strict=True)) or ((),) * len(Site._fields)

    def _in_place_of(self, param: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        """The proxy of a parameter with the data of `leaf`."""
        if not is_wrapper(param):
            return self._known(leaf)  # of the parameter's class, even for a plain tensor
        if id(param) not in self._stand_ins:
            self._stand_ins[id(param)] = stand_in(param, self.device, self._known)
        return self._stand_ins[id(param)]

    def _known(self, leaf: torch.Tensor) -> StreamedParameter:
        if id(leaf) not in self._made:
            self._made[id(leaf)] = self._proxy_of(leaf)
        return self._made[id(leaf)]

    def _proxy_of(self, param: torch.Tensor) -> StreamedParameter:
        made, source = proxy_class(type(param)), self.source(param)

        make = partial(_make, param, made, self.device, source)
        if not param.requires_grad:
            return make()
        with torch.enable_grad():
            linked: StreamedParameter = Link.apply(param, make)  # type: ignore[no-untyped-call]
        compat.run_soon(link_of(linked))
        return linked

    def fits(self, model: nn.Module, modules: Sequence[nn.Module] = ()) -> bool:
        """True if the same modules hold the same parameters under the same names as when the
        proxies were created.

        False after a rename (pruning, a parametrization), or if another module holds a parameter
        now (an adapter around its layer, a conversion): its old holder is no longer called.

        Args:
            modules: all modules of the model, if known.
        """
        return _same(_found(model, modules or compat.modules_of(model)), self._found)

    def of(self, param: torch.Tensor) -> StreamedParameter | None:
        """The proxy of a parameter; None for any other tensor."""
        return self._made.get(id(param))

    def forget(self) -> None:
        """Drop all references to parameters."""
        self.sites.clear()
        self._made.clear()
        self._stand_ins.clear()
        self._containers = Containers((), self.of)
        self._found = ()
        self._pairs = []
        self._columns = ((),) * len(Site._fields)

    def swap_in(self, undos: Undos) -> None:
        """Replace the model's parameters by the proxies until the undos run."""
        undone(self._follow)
        undos.append(self.put_back)
        self.are_in = True
        holders, names, params, proxies = self._columns
        for proxy, param in self._pairs:
            if proxy.__dict__ is not param.__dict__:
                proxy.__dict__ = param.__dict__
        exchange(holders, names, params, proxies)
        self._containers.swap_in(self.of)

    def _follow(self, undos: Undos) -> None:
        """Recreate the proxies of parameters whose `requires_grad` changed.

        Parameters used by eager code get new proxies in each call: several calls would otherwise
        share a link, and autograd would add their gradients in another order. A `torch.func`
        transform accepts no new link and has its own order.
        """
        use_unguarded(undos)
        follows = self.notice.has_used_any and not compat.in_transform()
        used = self.notice.has_used if follows else None
        if used is None and self._are_as_trained():
            return
        stale = {
            id(param): param
            for _, _, param, proxy in self.sites
            if is_trained(proxy) != param.requires_grad
            or (used is not None and param.requires_grad and used(param))
        }
        for param in stale.values():
            if is_wrapper(param):
                stand_in(param, self.device, self._known)  # which raises
        if stale:
            self._made |= {key: self._proxy_of(param) for key, param in stale.items()}
            self.sites = [
                site._replace(proxy=self._made[id(site.param)]) if id(site.param) in stale else site
                for site in self.sites
            ]
            self._columns = self._by_column()

    def _are_as_trained(self) -> bool:
        """True if no parameter's `requires_grad` changed since its proxy was created."""
        _, _, params, proxies = self._columns
        return list(map(IS_TRAINED, proxies)) == list(map(_TRAINED, params))

    def put_back(self) -> None:
        """Restore the model's parameters, except those that the forward replaced."""
        self.are_in = False
        self._containers.put_back()
        holders, names, params, proxies = self._columns
        exchange(holders, names, proxies, params)
        if self.notice.used:
            for proxy, _ in self._pairs:
                proxy.copied = None

    def stand_ins(self, model: nn.Module) -> StandIns:
        """The tensors that replace parameters during a `torch.func.functional_call`."""
        known: dict[tuple[int, str], Any] = {
            (id(site.holder), site.name): site.param for site in self.sites
        }
        given = compat.given_to_functional_call()
        found = [
            (holder, name, known.get((id(holder), name)), value)
            for holder, name, value in _parameters(model)
            if not isinstance(value, nn.Parameter) or id(value) in given
        ]
        return StandIns([each for each in found if each[2] is not each[3]])


_TRAINED = operator.attrgetter("requires_grad")


def _parameters(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Every parameter in every place, with the dict that holds it."""
    for module in compat.modules_of(model):
        for name, param in compat.parameters_of(module).items():
            if param is not None:
                yield compat.parameters_of(module), name, param


def _places(
    model: nn.Module,
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Every place to swap: holder, name, tensor and leaf."""
    for module in compat.modules_of(model):
        for name, param in compat.parameters_of(module).items():
            if param is None:
                continue
            yield compat.parameters_of(module), name, param, param
            if not is_wrapper(param):
                for member in members(module, param):
                    if member.path:
                        yield member.attributes, member.key, member.tensor, member.leaf


def _found(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """The places of tensors: holders, tensor counts, names and components of packed ones; and the
    tensors.

    Must be fast: every call of a model computes it.
    """
    holders = compat.holders_of_parameters(modules)
    names = [*chain.from_iterable(holders)]
    params = [*chain.from_iterable(map(dict.values, holders))]
    packed = list(_packed(model)) if any_packed(params) else []
    return holders, [*map(len, holders)], names, packed, params


def _packed(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """A key that is equal if packed parameters hold the same tensors in the same places."""
    for holder, name, param, leaf in _places(model):
        yield id(holder), hash(name), id(param), id(leaf), *map(id, parts_of(param))


def _same(a: tuple[list[Any], ...], b: tuple[list[Any], ...]) -> bool:
    """True if holders and parameters are identical objects; both lists are alive, so ids are
    unique."""
    if not a or not b or a[1:4] != b[1:4] or len(a[0]) != len(b[0]):
        return False
    return all(map(operator.is_, a[0], b[0])) and all(map(operator.is_, a[4], b[4]))


def _make(
    param: torch.Tensor, made: type[StreamedParameter], device: torch.device, source: ParamSource
) -> StreamedParameter:
    with compat.without_torch_function():
        root = param.detach()
    data = root if source.copy is None else source.copy
    if compat.is_sharded(param):
        looks = torch.empty_strided(
            param.shape,
            param.stride(),
            dtype=data.dtype,
            device="meta",
            requires_grad=data.requires_grad,
        )
        proxy = made(looks, device)
        proxy.part = compat.local(data)
    else:
        proxy = made(data, device)
    proxy.root, proxy.param, proxy.source = root, param, source
    return proxy


# Tensors that replace a model's parameters for one call: `torch.func.functional_call`.


class StandIns:
    """Tensors that replaced a model's parameters: (holder, name, parameter, tensor).

    They may depend on parameters, so they are ordinary inputs of the call, outside of buckets.
    """

    def __init__(
        self, sites: Sequence[tuple[dict[str, Any], str, nn.Parameter | None, torch.Tensor]]
    ) -> None:
        self._holders = [holder for holder, _, _, _ in sites]
        self._names = [name for _, name, _, _ in sites]
        self._params = [param for _, _, param, _ in sites]
        self._tensors = [tensor for _, _, _, tensor in sites]

    def take_out(self, undos: Undos) -> None:
        """Put the parameters back until the undos run."""
        replace(self._holders, self._names, self._tensors, self._params, undos)

    def put_in(self, place: Callable[[torch.Tensor], torch.Tensor], undos: Undos) -> None:
        """Replace the parameters by the results of `place` for the tensors, until the undos run."""
        placed: dict[int, torch.Tensor] = {}
        for tensor in self._tensors:
            if id(tensor) not in placed:
                placed[id(tensor)] = place(tensor)
        inside = [placed[id(tensor)] for tensor in self._tensors]
        replace(self._holders, self._names, self._params, inside, undos)


# Lists, tuples and dicts of a model's modules that hold parameters of it.
# During a call they hold the proxies, like the modules. So `self.tied[0] is self.weight` holds in a
# forward too, and operations on a parameter from a list are streamed.


_DICTS = (dict, OrderedDict, defaultdict)
_OWN = frozenset(vars(nn.Module()))  # attributes that every module has


class Containers:
    """The containers that held parameters at construction. Owned by `Proxies`.

    Args:
        modules: all modules of a model.
        proxy_of: returns a parameter's proxy; None for any other object.
    """

    def __init__(
        self, modules: Sequence[nn.Module], proxy_of: Callable[[Any], StreamedParameter | None]
    ) -> None:
        self._places: list[tuple[Any, Any]] = []  # (container, key) pairs to swap
        self._tuples: dict[int, tuple[Any, Any]] = {}  # id -> with proxies, original
        self._lists: list[tuple[dict[str, Any], str, list[Any]]] = []  # attributes of modules
        seen: set[int] = set()
        for module in modules:
            attributes = vars(module)
            own = [name for name in attributes if name not in _OWN]
            self._places += _places_in(attributes, own, seen, lambda x: proxy_of(x) is not None)
        held = {id(container) for container, _ in self._places}
        for module in modules:
            for name, value in vars(module).items():
                if id(value) in held:
                    self._lists.append((vars(module), name, value))

    def swap_in(self, proxy_of: Callable[[Any], StreamedParameter | None]) -> None:
        """Replace parameters by proxies. The function is not stored: it belongs to the owner of
        this object, and a reference cycle would keep a bucket's memory until garbage collection."""

        def inside(value: Any) -> Any:
            proxy = proxy_of(value)
            return value if proxy is None else proxy

        if self._places:
            self._exchange(inside)
            self._exchange_made(inside)

    def put_back(self) -> None:
        """Replace proxies by their parameters."""
        if self._places:
            self._exchange(_outside, self._tuples)
            self._exchange_made(_outside)
            self._tuples.clear()

    def _exchange_made(self, other: Callable[[Any], Any]) -> None:
        """The same in lists that modules created during a call, like nn.LSTM."""
        for attributes, name, before in self._lists:
            now = attributes.get(name)
            if now is not before and type(now) is list:
                now[:] = map(other, now)

    def _exchange(self, other: Callable[[Any], Any], known: dict[int, Any] | None = None) -> None:
        for container, key in self._places:
            try:
                value = container[key]
            except (IndexError, KeyError):  # the list became shorter
                continue
            if type(value) is tuple:
                made = self._other_tuple(value, other, known)
            else:
                made = other(value)
            if made is not value:
                operator.setitem(container, key, made)

    def _other_tuple(
        self, value: tuple[Any, ...], other: Callable[[Any], Any], known: dict[int, Any] | None
    ) -> tuple[Any, ...]:
        if known is not None and id(value) in known:
            real: tuple[Any, ...] = known[id(value)][1]
            return real
        made = tuple(map(other, value))
        if all(map(operator.is_, made, value)):
            return value
        self._tuples[id(made)] = made, value
        return made


def _outside(value: Any) -> Any:
    if isinstance(value, StreamedParameter) and not value.is_view and value.param is not None:
        return value.param
    return value


def _places_in(
    container: Any, keys: Iterable[Any], seen: set[int], is_param: Callable[[Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """The places of parameters, and of tuples with parameters, in a container and its nested
    containers."""
    if id(container) in seen:
        return
    seen.add(id(container))
    for key in keys:
        value = container[key]
        kind = type(value)
        if kind is list:
            yield from _places_in(value, range(len(value)), seen, is_param)
        elif kind in _DICTS:
            yield from _places_in(value, list(value), seen, is_param)
        elif is_param(value) or (kind is tuple and any(map(is_param, value))):
            yield container, key
