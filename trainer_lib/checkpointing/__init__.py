"""Checkpoints on a disk or behind a URL: their format, saving, loading, retention and conversion."""
