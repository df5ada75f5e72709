"""What the device and the host give: streams, slots, buffers, threads."""
