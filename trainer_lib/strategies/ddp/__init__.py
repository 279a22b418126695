"""DistributedDataParallel: each rank holds the whole model, gradients are averaged."""
