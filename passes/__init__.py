"""Graph in, graph out: one pass a file.

rebase -> causal -> chunk -> partition -> templates -> differentiate -> plan -> split ->
recompute -> rerun -> offload_saved -> disk_saved -> offload_grad -> norms -> device_update ->
update_graph (or update_in_backward, instead of these four) -> disk -> prefetch -> slots ->
disk_weights -> free -> tokens -> lower

The first three take what was captured and return another capture. The others take a `Schedule` and
return another one, on a copy of its graphs. `megacompile.plan` runs them.
"""
