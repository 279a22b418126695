"""Builds the reader of a user's loader: map-style or iterable, all of it or one rank's share."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainer_lib.data_loader.order.batch_sampler_shard import BatchSamplerShard, index_source
from trainer_lib.data_loader.order.batch_slicing import Slicing
from trainer_lib.data_loader.order.epoch_order import iterates_as, with_samplers
from trainer_lib.data_loader.order.samples_per_rank import Sharing
from trainer_lib.data_loader.readers.map_reader import MapReader
from trainer_lib.data_loader.readers.reader import Reader
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.options.base import check_count
from trainer_lib.process_group import LoneProcess, ProcessGroup


@frozen_dataclass(kw_only=True)
class RankSplit:
    """How a loader is split between ranks; by default one rank reads all of it.

    Args:
        processes: How many ranks share it.
        index: The rank to read for.
        split_batches: The loader's batch size is that of all ranks together.
        even_batches: All ranks get the same number of full batches.
        slice_function: Cuts a rank's slice from a batch.
        dispatches: Rank 0 reads for all.
        group: The ranks that read different batches.
        world: All ranks.
    """

    processes: int = 1
    index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    slice_function: Callable[..., Any] | None = None
    dispatches: bool = False
    group: ProcessGroup
    world: ProcessGroup

    def __post_init__(self) -> None:
        check_count("num_processes", self.processes)
        if not 0 <= self.index < self.processes:
            raise ConfigurationError(
                f"process_index must be between 0 and {self.processes - 1} (got {self.index}): "
                f"num_processes is {self.processes}."
            )
        if self.dispatches and not self.is_real:
            raise ConfigurationError(
                f"dispatch_batches=True sends batches between the {self.group.size} ranks of this world, not between "
                f"num_processes={self.processes}. Leave num_processes and process_index out."
            )

    @property
    def is_real(self) -> bool:
        """Whether these are the ranks of this world, which can communicate."""
        return (self.processes, self.index) == (self.group.size, self.group.rank)

    @property
    def own_world(self) -> ProcessGroup:
        """All ranks of this world, if the loader is for them: those of one replica read the same batches."""
        return self.world if self.is_real else LoneProcess()

    def sharing(self, batch_size: int | None, drop_last: bool) -> Sharing:
        """Return how this rank shares batches with the other ranks."""
        return Sharing.of_batches(
            batch_size, self.processes, self.index, self.split_batches, drop_last, self.even_batches
        )

    def slicing(self, batch_size: int | None, come_ready: bool) -> Slicing | None:
        """Return how to cut batches for the other ranks; `None` if they are not cut."""
        if not self.split_batches or not (come_ready or self.slice_function is not None):
            return None
        if not self.dispatches:
            if not come_ready:
                return None
            raise ConfigurationError(
                "split_batches=True cannot split batches that the dataset makes (batch_size=None). Set "
                "split_batches=False, or let rank 0 cut them: dispatch_batches=True."
            )
        self.sharing(batch_size, drop_last=False)
        return Slicing(processes=self.processes, batch_size=batch_size, function=self.slice_function)

    def reader(
        self,
        loader: DataLoader[Any],
        seed_each_sample: bool = False,
        use_seedable_sampler: bool = False,
        low_memory_shuffle: bool = False,
    ) -> tuple[Reader, Slicing | None]:
        """Return a reader of a user's loader, and how its batches are cut for the other ranks if they are."""
        if has_indices(loader):
            return _map_reader(loader, self, seed_each_sample, use_seedable_sampler, low_memory_shuffle)
        reader, slicing = _iterable_reader(loader, self, seed_each_sample)
        reader.use_low_memory(low_memory_shuffle)
        return reader, slicing


def has_indices(loader: DataLoader[Any]) -> bool:
    """Whether the dataset of a loader is read by index (map-style) instead of iterated."""
    return not isinstance(loader.dataset, IterableDataset)


def check_can_seed(loader: DataLoader[Any]) -> None:
    """Check that `seed_each_sample` can be used with a loader.

    Raises:
        UnsupportedError: If its dataset is iterable.
    """
    if not has_indices(loader):
        raise UnsupportedError(
            "seed_each_sample=True needs samples with an index, and the dataset is iterable. Set "
            "seed_each_sample=False: an iterable dataset draws from (seed, epoch) anyway, in the same way on all ranks "
            "and after a resume."
        )


def check_preparable(loader: Any, mesh: Any) -> None:
    """Check that a loader can be prepared."""
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"prepare_data_loader needs a DataLoader (got {type(loader).__name__}).")
    if getattr(loader, "_is_accelerate_prepared", False):
        raise PreparationError(f"This {type(loader).__name__} is already prepared. Use it as it is.")
    if mesh is not None:
        raise UnsupportedError("torch_device_mesh is not supported by this version. Leave it out.")
    if getattr(loader, "next_iter_state", None) is not None:
        raise PreparationError(
            f"A state was loaded into this {type(loader).__name__} before it was prepared, and would be lost. Load the "
            "state of a prepared loader into the prepared loader."
        )
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise PreparationError(
                f"This loader's {type(sampler).__name__} already divides samples between {sampler.num_replicas} "
                "ranks, which preparing does too. Use the plain sampler: shuffle=True, or the sampler inside."
            )
    if loader.num_workers > 0 and not loader.in_order:
        warnings.warn(
            "in_order=False: batches may arrive in another order, so a saved position is not exact: a resumed run may "
            "repeat or miss samples. Use in_order=True.",
            stacklevel=3,
        )


def _map_reader(
    loader: DataLoader[Any], split: RankSplit, seed_each_sample: bool, use_seedable_sampler: bool, low_memory: bool
) -> tuple[Reader, Slicing | None]:
    name = index_source(loader)
    source = with_samplers(getattr(loader, name), use_seedable_sampler, low_memory=False)
    by_samples = iterates_as(source, "BatchSampler")
    slicing = split.slicing(source.batch_size if by_samples else None, come_ready=name == "sampler" and not by_samples)
    if slicing is None:
        shard = BatchSamplerShard(source, split.processes, split.index, split.split_batches, split.even_batches)
    else:
        shard = BatchSamplerShard(source, even_batches=split.even_batches)
        shard.fill_for(split.processes if by_samples else 1)
    return MapReader(loader, name, shard, source, seed_each_sample, low_memory), slicing


def _iterable_reader(
    loader: DataLoader[Any], split: RankSplit, seed_each_sample: bool
) -> tuple[Reader, Slicing | None]:
    from trainer_lib.data_loader.readers.iterable_reader import IterableReader

    if seed_each_sample:
        check_can_seed(loader)
    is_batched = loader.batch_sampler is not None
    sharing = split.sharing(loader.batch_size if is_batched else None, loader.drop_last)
    slicing = split.slicing(loader.batch_size if is_batched else None, come_ready=not is_batched)
    is_split = is_split_already(loader.dataset) and split.processes > 1
    if is_split and split.dispatches:
        raise ConfigurationError(
            f"dispatch_batches=True reads on rank 0 for all ranks, but this {type(loader.dataset).__name__} is split "
            "already, so that each rank has its own samples. Do not split it, or set dispatch_batches=False."
        )
    if is_split:
        sharing = replace(sharing, processes=1, ranks=(0,))
        group = split.group if split.is_real else None
        return IterableReader(loader, sharing, split.index, split.processes, split.processes, group), None
    if slicing is not None:
        sharing = replace(sharing, share=loader.batch_size or 1, processes=1, ranks=(0,))
        sharing = replace(sharing, fill=sharing.fill and is_batched)
    return IterableReader(loader, sharing, split.index, split.processes), slicing
