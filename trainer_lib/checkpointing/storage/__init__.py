"""Where checkpoints are kept: a folder of this machine, or one behind a URL."""
