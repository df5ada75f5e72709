"""Turns a captured graph into the schedule that runs: `compiler` asks `chooser` for a choice, which
searches (`planner`, `candidates`, `problem`), and `pipeline` makes the schedule."""
