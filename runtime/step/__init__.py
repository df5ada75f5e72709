"""`optimizer.step()` of a stock optimizer over streamed parameters."""
