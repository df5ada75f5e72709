"""Reads, initialises and saves a model's values, one bucket at a time."""
