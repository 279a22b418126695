"""From datasets to batches: datasets, dataloaders, samplers, collating, packing, mixing."""
