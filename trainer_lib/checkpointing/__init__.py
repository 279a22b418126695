"""This package is state on disk: what it is made of, how it is written so that it cannot be lost, and read back."""
