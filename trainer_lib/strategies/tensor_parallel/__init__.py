"""Tensor parallelism: the plan of a model, the styles of its modules, and the strategy."""
