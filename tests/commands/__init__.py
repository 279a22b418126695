"""This package is the tests of the command line."""
