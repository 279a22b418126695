"""Pipeline parallelism: where a model is cut, what flows between its stages, and the strategy."""
