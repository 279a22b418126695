"""One call of `Trainer.fit`: the training loop, what it puts together first, and what it does when asked."""
