"""Passes over graphs: `capture` rewrites captured graphs, `stages` cuts them into stages with
templates and code, and `schedule` takes a `Schedule` and returns a new one, on a copy of its
graphs. `edit` has the edits that they share.

`megacompile.plan.pipeline` runs the passes in order.
"""
