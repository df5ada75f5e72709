"""What the ops of a schedule do, and who runs them."""
