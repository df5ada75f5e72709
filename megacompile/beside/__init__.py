"""Processes next to this one, which compile what it will need."""
