"""What ran when, measured and predicted."""
