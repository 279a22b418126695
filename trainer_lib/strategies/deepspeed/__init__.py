"""DeepSpeed's ZeRO: each rank holds a shard of optimizer states, gradients and weights."""
