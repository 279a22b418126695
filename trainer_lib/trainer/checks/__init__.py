"""Checks before training starts: at construction, and before the first step."""
