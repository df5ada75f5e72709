"""The cost of a schedule on a machine: seconds, bytes, memory."""
