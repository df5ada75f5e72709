"""Split stages anew, so that they save a given share of what they would save.

    plan.budgets: 1 -> 0.5        1F gives s1_0 s1_1 s1_2        1F gives s1_0, and 1B computes more

The plan is made when sizes are known, so a stage has been split for speed by then. A stage that
gets a budget is split again, from the traced graph that is at hand; how much it saves changes what
its forward gives and its backward takes, so the backward is written again.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage, Template
from megacompile.passes.edit import calls_by_stage
from megacompile.passes.schedule.differentiate import differentiate
from megacompile.passes.stages.joint import Takes, split
from megacompile.passes.stages.templates import TemplateCache, next_index, with_stages


def split_stages(schedule: Schedule, *, cache: TemplateCache) -> Schedule:
    """The schedule in which every stage of `plan.budgets` saves no more than its share."""
    budgets = dict(schedule.plan.budgets)
    if schedule.backward is None or not budgets:
        return schedule
    stages = tuple(
        replace(stage, template=_within(stage, budgets[stage.index], cache))
        if stage.index in budgets and stage.traced.has_backward
        else stage
        for stage in schedule.stages
    )
    own = replace(schedule, draft=False)  # names that are given anew must not be taken
    made = differentiate(with_stages(_undifferentiated(own), stages))
    return replace(made, draft=schedule.draft)


def _within(stage: Stage, budget: float, cache: TemplateCache) -> Template:
    """The stage's template, split for a budget; one for all stages that share the template."""
    base = stage.traced
    if budget == base.budget:
        return base
    key = (base, budget)
    if key not in cache:
        assert base.joint is not None, "a stage without a backward saves nothing"
        takes = Takes(base.tangents, base.partial_gradients, base.tangent_metas)
        cache[key] = split(
            stage, base.joint, takes, base.gradients, index=next_index(cache), budget=budget
        )
    return cache[key]


def _undifferentiated(schedule: Schedule) -> Schedule:
    """The forward alone, as it was before `differentiate`."""
    new = schedule.copy()
    graph = new.forward
    outputs, _ = ops.returned(graph)
    graph.output_node().args = ((outputs, ()),)
    for index, call in calls_by_stage(graph, ops.forward).items():
        stage = new.stages[index]
        results = len(stage.outputs) + len(stage.mutated)
        for k, item in list(ops.items(call)):
            if k >= results:
                graph.erase_node(item)
        call.args = (*call.args[:3], False)
        call.meta["value"] = call.meta["value"][:results]
    for node in ops.nodes_of(graph, ops.save_rng, ops.snapshot):
        graph.erase_node(node)
    plain = replace(new, backward=None, saved_values=(), gradients=())
    return plain.copy()  # in a graph of its own, the names of what was erased are free
