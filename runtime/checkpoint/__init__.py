"""Reads, initializes and saves a model's values, one bucket at a time."""
