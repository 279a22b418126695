"""Samples that cannot be read: named in the error, or left out."""
