"""A model whose parameters are streamed: its calls, and their part in autograd."""
