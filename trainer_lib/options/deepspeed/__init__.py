"""DeepSpeed's JSON files and Accelerate's plugin for them."""
