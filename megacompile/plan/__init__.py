"""Turns a captured graph into the schedule that runs: the passes, and the search for their options.

`compiler` is the entry. It asks `chooser` for a choice, and `pipeline` makes the schedule of it.
The search is in `planner` and, for what options allow, in `searches`. Both move through `tries`,
which simulates choices of a `problem`; `freeing` improves the best one. `wanted` keeps the places
of buckets, and `explanation` prints the plan.
"""
