"""Graph in, graph out: one pass a file, named by a verb.

partition -> templates -> differentiate -> plan -> split -> recompute -> offload_activations ->
offload -> prefetch -> slots -> free -> lower. Each takes a `Schedule` and returns another one, on a
copy of its graphs.
"""
