"""Passes from a captured graph to stages with templates."""
