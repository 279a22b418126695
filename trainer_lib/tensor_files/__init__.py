"""This package is tensors in files: safetensors, in the layout of Hugging Face's libraries."""
