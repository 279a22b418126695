"""The Trainer's checkpoints: saving them, finding the one to resume from, resuming."""
