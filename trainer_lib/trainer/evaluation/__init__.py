"""The evaluation loop, predictions and generation."""
