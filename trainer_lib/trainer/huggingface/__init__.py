"""Arguments, callbacks and trainers of Hugging Face's Trainer, converted."""
