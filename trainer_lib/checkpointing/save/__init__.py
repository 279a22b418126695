"""Saving a checkpoint: atomically, in the background, to a URL; and deleting old ones."""
