"""A model's values: read from safetensors, initialised at random, saved; a bucket at a time."""
