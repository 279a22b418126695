"""Tensors in files: safetensors, in the layout of Hugging Face's libraries."""
