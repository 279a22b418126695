"""Checkpoints of Megatron-LM: their pieces, their names, and what they are in transformers."""
