"""The lowest layer: errors, the environment, imports, nested tensors and durations."""
