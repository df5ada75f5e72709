"""Turns a captured graph into the schedule that runs: the passes, and the search for their options.

`compiler` is the entry. It asks `chooser` for a choice, and `pipeline` makes the schedule of it.
The search is in `planner`. It moves through `candidates`, which simulates choices of a `problem`.
`budget` keeps the memory and the places of buckets, and `explanation` prints the plan.
"""
