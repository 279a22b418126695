"""The `Trainer`, its training loop, arguments, evaluation, checkpoints and tools."""
