"""Hyperparameter search: trials that train from the same weights with other arguments."""
