"""Graph in, graph out: `capture` works on captured graphs, `stages` makes stages with templates of
them, and code of these, `schedule` takes a `Schedule` and returns another one, on a copy of its
graphs. `edit` has what several of them do to a graph.

`megacompile.plan.pipeline` runs the passes, and has their order.
"""
