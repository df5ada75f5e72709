"""The systems' training code: a module each, with a `setup` that returns a `System`."""
