"""Loading a checkpoint: finding it, verifying it, falling back to an older one."""
