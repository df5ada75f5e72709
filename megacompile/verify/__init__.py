"""Proves from its graphs that a schedule is free of hazards."""
