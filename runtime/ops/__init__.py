"""The ops of a schedule at run time, and their executor."""
