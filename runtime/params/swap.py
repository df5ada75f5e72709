"""The swap: for the time of a call, the proxies of a model's parameters are in their places."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.params.eager_notice import EagerNotice
from megacompile.runtime.params.proxies import Link, StreamedParameter
from megacompile.runtime.params.stand_ins import StandIns
from megacompile.runtime.params.undo import Undos, exchange, undone, use_unguarded


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
        self.notice = EagerNotice()
        self.sites: list[Site] = []
        self._made: dict[int, StreamedParameter] = {}  # by the parameter's id
        for holder, name, param in _parameters(model):
            if id(param) not in self._made:
                self._made[id(param)] = self._proxy_of(param)
            self.sites.append(Site(holder, name, param, self._made[id(param)]))
        self._found = _found(model)
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
        return _same(_found(model), self._found)

    def pairs(self) -> Sequence[tuple[nn.Parameter, StreamedParameter]]:
        return [(site.param, site.proxy) for site in self.sites]

    def of(self, param: torch.Tensor) -> StreamedParameter | None:
        """The proxy of a parameter; None for any other tensor."""
        return self._made.get(id(param))

    def forget(self) -> None:
        """Refer to no parameter any more."""
        self.sites.clear()
        self._made.clear()
        self._found = ()
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


def _parameters(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Every parameter in every place that it has, with the dict that holds it there."""
    for module in compat.modules_of(model):
        for name, param in compat.parameters_of(module).items():
            if param is not None:
                yield compat.parameters_of(module), name, param


def _found(model: nn.Module) -> tuple[list[Any], ...]:
    """Where parameters are: holders, how many each has, by which names; and they."""
    holders = [holder for m in compat.modules_of(model) if (holder := compat.parameters_of(m))]
    names = [*chain.from_iterable(holders)]
    params = [*chain.from_iterable(map(dict.values, holders))]
    return holders, [*map(len, holders)], names, params


def _same(a: tuple[list[Any], ...], b: tuple[list[Any], ...]) -> bool:
    """The very same holders and parameters? Both are alive, so an id is of one object."""
    if not a or not b or a[1:3] != b[1:3]:
        return False
    return all(map(operator.is_, a[0], b[0])) and all(map(operator.is_, a[3], b[3]))


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
