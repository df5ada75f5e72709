"""Processes beside this one, which compile what it will need."""
