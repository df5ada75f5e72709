"""Updates of buckets: on the host, on the device, in chunks."""
