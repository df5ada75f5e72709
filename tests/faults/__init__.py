"""Faults planted in the product, one at a time: which test catches each.

`python -m tests.faults --map MAP` judges the test suite, not the product. A fault is an edit of one
place of the product (`tests/faults/listed`). The suite's power is the share of them that some test
catches.
"""
