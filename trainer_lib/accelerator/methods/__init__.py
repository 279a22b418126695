"""The `Accelerator`'s methods, one topic a file."""
