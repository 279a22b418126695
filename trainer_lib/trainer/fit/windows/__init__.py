"""The window of an update: its micro-batches, and what ranks tell each other with its gradients."""
