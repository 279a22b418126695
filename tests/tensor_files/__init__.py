"""The tests of tensors in files."""
