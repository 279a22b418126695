"""This package is the tests; it mirrors the tree of the library."""
