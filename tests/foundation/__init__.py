"""Tests of the ground floor: environment, trees, optional packages, errors."""
