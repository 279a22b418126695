"""The order of samples: shuffling, which rank reads what, the position to resume from."""
