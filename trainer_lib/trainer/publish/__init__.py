"""A trained model for others: `save_pretrained`, the Hugging Face Hub, a model card, export."""
