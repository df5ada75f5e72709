"""From a captured graph to the schedule that runs: the passes, and the search for their options."""
