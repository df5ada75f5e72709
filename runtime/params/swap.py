"""The swap: replaces a model's parameters by their proxies for a call.

Temporary changes are undone on every exit, even if a signal handler raises. Ctrl-C may arrive
between any two bytecodes: right after a change, or inside the `finally` that undoes it. So an undo
is appended to the list before its change; it may run without the change, and twice; and two nested
`finally` blocks run the list. An operation that must not be interrupted is one C call, inside which
no signal handler runs.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat, starmap
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from megacompile import compat
from megacompile.packed import any_packed, is_wrapper, members
from megacompile.runtime.params.eager_notice import EagerNotice
from megacompile.runtime.params.looks import is_trained, link_of, parameter_of
from megacompile.runtime.params.proxies import (
    Link,
    ParamSource,
    StreamedParameter,
    parts_of,
    proxy_class,
    stand_in,
)

T = TypeVar("T")
Undos = list[Callable[[], object]]


def undone(body: Callable[[Undos], T]) -> T:
    """Call `body` with an empty list, then the undos that it appended, in reverse order."""
    undos: Undos = []
    try:
        try:
            return body(undos)
        finally:
            _run(undos)
    finally:
        _run(undos)


def _run(undos: Undos) -> None:
    while undos:
        undos[-1]()
        undos.pop()


def exchange(
    holders: Sequence[dict[str, Any]],
    names: Sequence[str],
    before: Sequence[object],
    after: Sequence[object],
) -> None:
    """Set `holder[name] = after` where it is `before`; one C call."""
    places = zip(holders, names, after, strict=True)
    there = map(operator.is_, map(dict.get, holders, names), before)
    deque(starmap(operator.setitem, compress(places, there)), maxlen=0)


def replace(
    holders: Sequence[dict[str, Any]],
    names: Sequence[str],
    before: Sequence[object],
    after: Sequence[object],
    undos: Undos,
) -> None:
    """Exchange, until the undos run."""
    undos.append(functools.partial(exchange, holders, names, after, before))
    exchange(holders, names, before, after)


def hold(lock: threading.RLock, undos: Undos) -> None:
    """Hold a lock until the undos run."""
    held: list[tuple[()]] = []

    def release() -> None:
        deque(starmap(lock.release, map(held.pop, repeat(0, len(held)))), maxlen=0)

    undos.append(release)
    held.extend(compress([()], map(lock.acquire, [True])))


def use_unguarded(undos: Undos) -> None:
    """Bypass guards in this thread until the undos run (see `guards`)."""
    undos.append(functools.partial(compat.set_torch_function_state, compat.torch_function_state()))
    compat.set_torch_function_state(compat.NO_SUBCLASSES)


class Site(NamedTuple):
    """A parameter in a module, or a tensor in the state of a packed parameter."""

    holder: dict[str, Any]  # the module's `_parameters`, or the state's `__dict__`
    name: str
    param: torch.Tensor
    proxy: torch.Tensor  # or a wrapper over proxies


class Proxies:
    """The proxies of a model's parameters; swaps them in. `ModelBuckets` keeps it until the model
    gets other parameters or their AccumulateGrad nodes change."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,  # that computes
        source: Callable[[torch.Tensor], ParamSource],  # of a parameter
        notice: EagerNotice,  # records uses by eager code
    ) -> None:
        self.device = device
        self.source = source
        self.notice = notice
        self.are_in = False  # True while the model holds proxies
        self._made: dict[int, StreamedParameter] = {}  # by leaf id
        wrappers: dict[int, torch.Tensor] = {}
        sites = []
        for holder, name, param, leaf in _places(model):
            if not is_wrapper(param):
                proxy: torch.Tensor = self._known(leaf)  # mimics the leaf's class
            elif id(param) in wrappers:
                proxy = wrappers[id(param)]
            else:
                proxy = wrappers[id(param)] = stand_in(param, device, self._known)
            sites.append(Site(holder, name, param, proxy))
        modules = compat.modules_of(model)
        self._found = _found(model, modules)
        self._containers = _containers(modules, self._made)
        self._swapped: list[Any] = []  # containers that hold proxies
        self._set(sites)

    def _set(self, sites: list[Site]) -> None:
        self.sites = sites
        proxies = {id(s.proxy): s.proxy for s in sites}
        self._pairs: list[tuple[Any, Any]] = [
            (proxy, proxy.param)
            for proxy in proxies.values()
            if isinstance(proxy, StreamedParameter)
        ]
        columns = tuple(zip(*sites, strict=True))  # holders, names, parameters and proxies
        self._columns: tuple[tuple[Any, ...], ...] = columns or ((),) * len(Site._fields)

    def _known(self, leaf: torch.Tensor) -> StreamedParameter:
        if id(leaf) not in self._made:
            self._made[id(leaf)] = self._proxy_of(leaf)
        return self._made[id(leaf)]

    def _proxy_of(self, param: torch.Tensor) -> StreamedParameter:
        source = self.source(param)

        def make() -> StreamedParameter:
            with compat.without_torch_function():
                root = param.detach()
            data, part = root if source.copy is None else source.copy, None
            if compat.is_sharded(param):
                part, dtype = compat.local(data), data.dtype
                data = torch.empty_strided(param.shape, param.stride(), dtype=dtype, device="meta")
            proxy = proxy_class(type(param))(data, self.device)
            proxy.root, proxy.param, proxy.part, proxy.source = root, param, part, source
            return proxy

        if not param.requires_grad:
            return make()
        with torch.enable_grad():
            linked: StreamedParameter = Link.apply(param, make)  # type: ignore[no-untyped-call]
        compat.run_soon(link_of(linked))
        return linked

    def fits(self, model: nn.Module, modules: Sequence[nn.Module]) -> bool:
        """True if the same modules (all of the model's) hold the same parameters under the same
        names as when the proxies were created.

        False after a rename (pruning, a parametrization), or if another module holds a parameter
        now (an adapter around its layer, a conversion): its old holder is no longer called.
        """
        a, b = _found(model, modules), self._found
        if not b or a[1:4] != b[1:4] or len(a[0]) != len(b[0]):
            return False
        # by identity: `==` would compare contents
        return all(map(operator.is_, a[0], b[0])) and all(map(operator.is_, a[4], b[4]))

    def of(self, param: torch.Tensor) -> StreamedParameter | None:
        """The proxy of a parameter; None for any other tensor."""
        return self._made.get(id(param))

    def forget(self) -> None:
        self._made.clear()
        self._containers, self._swapped, self._found = [], [], ()
        self._set([])

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
        if self._containers:
            self._swapped = [attributes.get(name) for attributes, name in self._containers]
            self._exchange_in_containers(lambda value: self._made.get(id(value), value))

    def _exchange_in_containers(self, other: Callable[[Any], Any]) -> None:
        """Exchange parameters in modules' lists, tuples and dicts too, so that `self.tied[0] is
        self.weight` holds in a forward, and operations on a parameter from a list are streamed. A
        module may replace such a list during a call, as nn.LSTM does."""
        seen: Seen = {}
        for container in self._swapped:
            _exchanged(container, other, seen)
        for attributes, name in self._containers:
            if name in attributes:
                attributes[name] = _exchanged(attributes[name], other, seen)

    def _follow(self, undos: Undos) -> None:
        """Recreate the proxies of parameters whose `requires_grad` changed.

        Parameters used by eager code get new proxies in each call: several calls would otherwise
        share a link, and autograd would add their gradients in another order. Frozen ones get new
        proxies after a change in place: autograd saves a proxy's version before the use that would
        note the change. A `torch.func` transform accepts no new link and has its own order.
        """
        use_unguarded(undos)
        used = self.notice.ever
        if used and compat.in_transform():
            used = set()
        _, _, params, proxies = self._columns
        if not used and list(map(is_trained, proxies)) == list(map(_TRAINED, params)):
            return
        stale = {
            id(param): param
            for _, _, param, proxy in self.sites
            if is_trained(proxy) != param.requires_grad
            or (param.requires_grad and not used.isdisjoint((id(param), id(None))))
            or (isinstance(proxy, StreamedParameter) and proxy.outdated())
        }
        for param in stale.values():
            if is_wrapper(param):
                stand_in(param, self.device, self._known)  # which raises
        if stale:
            new = {key: self._proxy_of(param) for key, param in stale.items()}
            self._made |= new
            self._set([s._replace(proxy=new.get(id(s.param), s.proxy)) for s in self.sites])

    def put_back(self) -> None:
        """Restore the model's parameters, except those that the forward replaced."""
        self.are_in = False
        if self._containers:
            self._exchange_in_containers(parameter_of)
            self._swapped = []
        holders, names, params, proxies = self._columns
        exchange(holders, names, proxies, params)
        if self.notice.ever:
            for proxy, _ in self._pairs:
                proxy.copied = None

    def stand_ins(self, model: nn.Module) -> StandIns:
        """The tensors that replace parameters during a `torch.func.functional_call`."""
        known: dict[tuple[int, str], Any] = {(id(s.holder), s.name): s.param for s in self.sites}
        given, found = compat.given_to_functional_call(), []
        for holder in compat.holders(compat.modules_of(model), "parameters"):
            for name, value in holder.items():
                param = known.get((id(holder), name))
                if value is not None and param is not value:
                    if not isinstance(value, nn.Parameter) or id(value) in given:
                        found.append((holder, name, param, value))
        return StandIns(*zip(*found, strict=True)) if found else StandIns()


_TRAINED = operator.attrgetter("requires_grad")


def _places(
    model: nn.Module,
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Every place to swap: holder, name, tensor and leaf."""
    for module in compat.modules_of(model):
        holder = compat.parameters_of(module)
        for name, param in holder.items():
            if param is None:
                continue
            yield holder, name, param, param
            for member in () if is_wrapper(param) else members(module, param):
                if member.path:
                    yield vars(member.holder), member.key, member.tensor, member.leaf


def _found(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """A model's tensors and their places: holders, tensor counts, names, components of packed ones,
    and last the tensors. Must be fast, because every call of a model computes it."""
    holders = compat.holders(modules, "parameters")
    names = [*chain.from_iterable(holders)]
    params = [*chain.from_iterable(map(dict.values, holders))]
    packed = []  # equal if packed parameters hold the same tensors in the same places
    for holder, name, param, leaf in _places(model) if any_packed(params) else ():
        packed.append((id(holder), name, id(param), id(leaf), *map(id, parts_of(param))))
    return holders, [*map(len, holders)], names, packed, params


class StandIns(NamedTuple):
    """Tensors that replaced a model's parameters, for `torch.func.functional_call`, and their
    places. They may depend on parameters, so they are ordinary inputs of the call."""

    holders: Sequence[dict[str, Any]] = ()
    names: Sequence[str] = ()
    params: Sequence[nn.Parameter | None] = ()
    tensors: Sequence[torch.Tensor] = ()

    def take_out(self, undos: Undos) -> None:
        replace(self.holders, self.names, self.tensors, self.params, undos)

    def put_in(self, place: Callable[[torch.Tensor], torch.Tensor], undos: Undos) -> None:
        """Replace the parameters by the results of `place` for the tensors, until the undos run."""
        distinct = {id(tensor): tensor for tensor in self.tensors}
        placed = {key: place(tensor) for key, tensor in distinct.items()}
        inside = [placed[id(tensor)] for tensor in self.tensors]
        replace(self.holders, self.names, self.params, inside, undos)


_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict)
Seen = dict[int, tuple[Any, Any]]  # id -> a container, and its replacement or itself
_OWN = frozenset(vars(nn.Module()))  # attributes that every module has


def _containers(
    modules: Sequence[nn.Module],
    known: Mapping[int, object],  # has the ids of the parameters
) -> list[tuple[dict[str, Any], str]]:
    """The attributes of modules that are containers of parameters, at any depth."""
    found = []
    for module in modules:
        for name, value in vars(module).items():
            if name not in _OWN and type(value) in _CONTAINERS:
                members: list[Any] = []
                _exchanged(value, functools.partial(_noted, members), {})
                if not known.keys().isdisjoint(map(id, members)):
                    found.append((vars(module), name))
    return found


def _noted(members: list[Any], member: Any) -> Any:
    members.append(member)
    return member


def _exchanged(value: Any, other: Callable[[Any], Any], seen: Seen) -> Any:
    """Exchange a container's members in place and return it; a changed tuple becomes a new one."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return other(value)
    if id(value) in seen:
        return seen[id(value)][1]
    made = value
    if kind is tuple:
        each = tuple([_exchanged(member, other, seen) for member in value])
        made = value if all(map(operator.is_, each, value)) else each
    seen[id(value)] = value, made
    for key in () if kind is tuple else range(len(value)) if kind is list else list(value):
        member = _exchanged(value[key], other, seen)
        if member is not value[key]:
            value[key] = member
    return made
