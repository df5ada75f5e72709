"""Triton kernels, one op a file."""
