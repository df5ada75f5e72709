"""Carries a schedule out: host memory, streams, slots, proxies, executor."""
