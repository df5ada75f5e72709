"""Updates of buckets: on the host, on the device, or by both in chunks.

An update (`update`) has a backend and a place. `optimizer.step()` starts those of host memory in
`workers`, where a device helps, and those of gradients that a backward left on the device in
`on_device`. With `megacompile(model, optimizer=...)` a backward starts them in `in_backward`.
"""
