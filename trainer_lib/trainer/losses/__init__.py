"""Losses: where the loss of a batch comes from, as sums over items that are averaged exactly."""
