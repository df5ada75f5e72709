"""Parameters, gradients and states in their buckets, their guards and their proxies."""
