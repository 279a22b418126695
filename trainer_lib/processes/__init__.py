"""Processes of the operating system: parents, ports, exit codes, failure records."""
