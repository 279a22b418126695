"""Inspect and wrap `nn.Module`s: names, tied parameters, repeated blocks, compilation."""
