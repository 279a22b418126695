"""This package is the command line, one file a command."""
