"""A scratch file on a disk, and its reads and writes in background threads."""
