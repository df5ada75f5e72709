"""From a captured graph to stages with templates."""
