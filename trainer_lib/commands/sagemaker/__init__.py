"""A launch on Amazon SageMaker."""
