"""This package is the ground floor: it knows Python, the environment and tensors, and nothing of training."""
