"""Updates of buckets: on the host, on the device, or by both in chunks."""
