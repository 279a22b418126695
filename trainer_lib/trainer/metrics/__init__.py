"""Metrics: by name, as functions and as objects, exact on any number of ranks."""
