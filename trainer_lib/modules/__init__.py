"""This package is what looks into modules and takes them apart: names, ties, repeated blocks."""
