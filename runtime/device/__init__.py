"""The resources of the device and the host: streams, slots, buffers, threads."""
