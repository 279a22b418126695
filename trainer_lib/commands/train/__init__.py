"""`trainer-lib train`: training of a common task without a script."""
