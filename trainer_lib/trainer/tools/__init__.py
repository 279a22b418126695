"""Tools that run the training loop in a sandbox: learning-rate finder, batch-size finder, search, preview."""
