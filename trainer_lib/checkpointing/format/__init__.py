"""The format of a checkpoint: its folder, manifest, parts and values."""
