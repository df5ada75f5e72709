"""The optimizers' rules and states, and their kernels."""
