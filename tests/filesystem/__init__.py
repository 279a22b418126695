"""Tests of files: atomic writes, checksums, direct reads."""
