"""Tests of the lowest layer: environment, nested tensors, optional packages, errors."""
