"""Parameters, gradients and states in their buckets, and who looks at them."""
