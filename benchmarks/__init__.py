"""Benchmarks: the overhead of this library over a hand-written loop and other libraries."""
