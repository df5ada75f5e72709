"""The loops that people write, over real models with small sizes: captures, seconds and losses.

`python -m benchmarks.loops` measures them (`__main__`), `tests/models/test_real_loops.py` counts
their captures. `catalogue` has all of them by name.
"""
