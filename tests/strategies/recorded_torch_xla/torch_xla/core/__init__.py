"""The part of torch_xla that has collectives."""
