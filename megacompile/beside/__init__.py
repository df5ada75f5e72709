"""Helper processes that compile code for this one."""
