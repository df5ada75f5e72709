"""Passes that take a schedule and return a new one."""
