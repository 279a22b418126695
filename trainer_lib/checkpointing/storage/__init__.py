"""The storage of checkpoints: a folder on this machine, or one behind a URL."""
