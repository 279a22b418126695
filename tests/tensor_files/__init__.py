"""Tests of tensors in files."""
