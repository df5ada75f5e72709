"""The data between the parts: what a schedule consists of. Nothing here computes anything."""
