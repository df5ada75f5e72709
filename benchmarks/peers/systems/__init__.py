"""How each system trains: a module each, with a `setup` that gives a `System`."""
