"""Tensors in the place of a model's parameters for one call: `torch.func.functional_call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megacompile.runtime.params.undo import Undos, exchange


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
        """Until the undos run, what `place` returns for the tensors is where the parameters are."""
        placed: dict[int, torch.Tensor] = {}
        for tensor in self._tensors:
            if id(tensor) not in placed:
                placed[id(tensor)] = place(tensor)
        inside = [placed[id(tensor)] for tensor in self._tensors]
        undos.append(partial(exchange, self._holders, self._names, inside, self._params))
        exchange(self._holders, self._names, self._params, inside)
