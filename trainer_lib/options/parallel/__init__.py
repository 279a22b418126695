"""Options of parallelism: DDP, FSDP2, tensor, pipeline, context and sequence parallelism."""
