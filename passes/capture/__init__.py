"""Passes on the captured graph, before it is cut into stages."""
