"""Reading this rank's share of a dataset: map-style and iterable."""
