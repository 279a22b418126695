"""FSDP2: each rank holds a shard of each weight."""
