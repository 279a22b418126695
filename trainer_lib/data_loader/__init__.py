"""Data loading across ranks: each rank reads its share of one global order, from any position on."""

from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher
from trainer_lib.data_loader.order.batch_sampler_shard import BatchSamplerShard, get_sampler
from trainer_lib.data_loader.order.samplers import LowMemoryRandomSampler, SeedableRandomSampler, SkipBatchSampler
from trainer_lib.data_loader.prepare import prepare_data_loader, skip_first_batches
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.data_loader.readers.iterable_dataset_shard import IterableDatasetShard
from trainer_lib.data_loader.shard_loader import DataLoaderShard, SkipDataLoader
from trainer_lib.data_loader.state_mixin import DataLoaderStateMixin

DataLoaderAdapter = PreparedLoader  # its name in Accelerate, which scripts ask for

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "LowMemoryRandomSampler",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
