"""This package is data loading: each process reads its share, in an order that all agree on, from any place on."""

from trainer_lib.data_loader.batches import BatchSamplerShard
from trainer_lib.data_loader.dispatch import DataLoaderDispatcher
from trainer_lib.data_loader.iterable import IterableDatasetShard
from trainer_lib.data_loader.prepare import get_sampler, prepare_data_loader, skip_first_batches
from trainer_lib.data_loader.samplers import SeedableRandomSampler, SkipBatchSampler
from trainer_lib.data_loader.shard import DataLoaderShard, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
