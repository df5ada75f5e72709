"""The data structures of a schedule, shared by all parts. This package computes nothing."""
