"""The times of ops, measured and predicted."""
