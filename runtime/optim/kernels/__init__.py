"""The Triton kernels of the optimizer rules."""
