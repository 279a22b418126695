"""Nested structures of tensors, their operations, and the values of a batch."""
