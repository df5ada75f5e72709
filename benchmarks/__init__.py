"""Benchmarks. Models are made on the GPU, before megacompile() could set the allocator up."""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
