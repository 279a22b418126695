"""The tests of state on disk."""
