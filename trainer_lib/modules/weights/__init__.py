"""A module's parameters and buffers: names, patterns, sizes, ties, digests and state dicts."""
