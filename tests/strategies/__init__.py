"""Tests of the ways to spread a model over processes."""
