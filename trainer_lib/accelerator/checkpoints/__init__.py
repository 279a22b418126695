"""The checkpoints of an `Accelerator`: their parts, saving, loading, and states of other libraries."""
