"""What an `Accelerator` does for scripts that train with Megatron-LM's options."""
