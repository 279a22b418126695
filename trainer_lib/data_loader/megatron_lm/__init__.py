"""Megatron-LM's indexed datasets (`.bin` and `.idx` files), and the samples of GPT that they hold."""
