"""A scratch file on a disk, and reads and writes of it that go on behind the caller."""
