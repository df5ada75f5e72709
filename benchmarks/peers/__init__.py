"""megacompile and others on the same training step, side by side: `python -m benchmarks.peers`."""
