"""Samples that cannot be read: the error names them, or they are skipped."""
