"""This package is the benchmarks: what the engine costs beside a loop written by hand, and beside its peers."""
