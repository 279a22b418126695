"""The command `trainer-lib checkpoint`: look at checkpoints, prune them and convert them."""
