"""Tensor, context, sequence and pipeline parallelism beside the same on plain torch, written by hand."""
