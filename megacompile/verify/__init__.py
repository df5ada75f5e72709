"""Proof that a schedule is free of hazards, from its graphs alone."""
