"""Checkpoints of Hugging Face's Trainer and of Accelerate, read and converted."""
