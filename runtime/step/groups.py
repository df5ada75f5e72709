"""The scalars of parameter groups for a step by rule: found out once for each, not for each of
their parameters."""

from __future__ import annotations

from megacompile.runtime.optim.rule import Group, OptimizerRule


class Groups:
    """The parameter groups of an optimizer, whose options are not changed meanwhile."""

    def __init__(self, rule: OptimizerRule) -> None:
        self.rule = rule
        self._names: dict[int, tuple[str, ...]] = {}
        self._hyper: dict[tuple[int, float, bool, float], tuple[float, ...]] = {}

    def names(self, group: Group) -> tuple[str, ...]:
        """The states of a parameter of a group."""
        if id(group) not in self._names:
            self._names[id(group)] = self.rule.state_names(group)
        return self._names[id(group)]

    def hyper(self, group: Group, step: float, *, first: bool, scale: float) -> tuple[float, ...]:
        """The numbers of a step (see `OptimizerRule.hyper`)."""
        key = (id(group), step, first, scale)
        if key not in self._hyper:
            made = self.rule.hyper(group, step=step, first=first, scale=scale)
            self._hyper[key] = made
        return self._hyper[key]
