"""Turns a captured graph into the schedule that runs: the passes, and the search for their
options."""
