"""This package is the tests of the launchers."""
