"""Attention over keys and values that other ranks hold, in ring or all-to-all exchanges."""
