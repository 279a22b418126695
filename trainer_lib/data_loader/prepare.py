"""This file is preparing loaders: what becomes of a user's loader, and starting one in the middle of a pass."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher
from trainer_lib.data_loader.order.batch_slicing import Slicing
from trainer_lib.data_loader.order.data_rng import positive_seed
from trainer_lib.data_loader.order.epoch_order import iterates_as, seedable
from trainer_lib.data_loader.order.rank_batches import BatchSamplerShard
from trainer_lib.data_loader.order.rank_rounds import Sharing
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler, SkipBatchSampler
from trainer_lib.data_loader.prepared_loader import Delivery, PreparedLoader
from trainer_lib.data_loader.readers.iterable_reader import IterableReader
from trainer_lib.data_loader.readers.map_reader import MapReader
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.data_loader.readers.shard_reader import Reader
from trainer_lib.data_loader.shard_loader import DataLoaderShard
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.options.base import check_count
from trainer_lib.options.enums import RNGType
from trainer_lib.process_group import LoneProcess, ProcessGroup
from trainer_lib.state.partial_state import PartialState, is_initialized


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | int | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    seed_each_sample: bool = False,
) -> DataLoaderShard | DataLoaderDispatcher:
    """Return a loader that reads this process's share of a user's loader, which itself stays as it is.

    The order of a shuffled loader is a function of seed and epoch, the same for any number of processes. Each pass is
    an epoch further on, or the one given to `set_epoch`.

    Args:
        dataloader: The user's loader.
        device: Where batches go, with `put_on_device`.
        num_processes: How many processes share it; by default as many as there are.
        process_index: Which of them this is; by default what it is.
        split_batches: The loader's batch size is that of all processes together; each takes its slice.
        put_on_device: Bring batches to `device`.
        rng_types: The generators to synchronize between the processes at the start of a pass.
        dispatch_batches: The first process reads and sends the others their batches. Off unless asked for.
        even_batches: Fill the last round with samples from the beginning, so that all processes have the same number
            of full batches.
        slice_fn_for_dispatch: With `dispatch_batches` and `split_batches`: how to cut a process's slice from a batch;
            called with the batch, a slice, `process_index` and `num_processes`.
        use_seedable_sampler: Accepted: the order always is a function of seed and epoch.
        data_seed: The seed of the order; by default that of the sampler's generator, else torch's seed. The first
            process's is taken by all.
        non_blocking: Do not wait for copies to the device.
        use_stateful_dataloader: Accepted: there is always a `state_dict`.
        torch_device_mesh: Not supported by this version.
        seed_each_sample: Seed the generators before each sample of a map-style dataset from (seed, epoch, index).

    Example:
        >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader], loader.rows
        ([[2, 3], [1, 2]], None)
    """
    del use_seedable_sampler, use_stateful_dataloader
    _check(dataloader, torch_device_mesh)
    group = _group(num_processes, process_index)
    split = _Split(
        processes=group.size if num_processes is None else num_processes,
        index=group.rank if process_index is None else process_index,
        split_batches=split_batches,
        even_batches=even_batches,
        slice_function=slice_fn_for_dispatch,
        dispatches=bool(dispatch_batches),
        group=group,
    )
    delivery = Delivery(
        device=device if put_on_device else None,
        non_blocking=non_blocking,
        rng_types=_kinds(rng_types, _generator(dataloader)),
        generator=_generator(dataloader),
    )
    seed = split.agreed_seed(_seed(dataloader) if data_seed is None else positive_seed(data_seed))
    reader, slicing = (
        _iterable_reader(dataloader, split, seed_each_sample)
        if not has_indices(dataloader)
        else _map_reader(dataloader, split, seed_each_sample)
    )
    if not split.dispatches:
        return DataLoaderShard.around(reader, delivery, seed, split.processes)
    if slicing is None and split.index == 0:
        reader.read_for_all()
    return DataLoaderDispatcher.around(reader, delivery, seed, group, slicing)


def has_indices(loader: DataLoader[Any]) -> bool:
    """Whether the dataset of a loader is read by index (map-style), and not iterated."""
    return not isinstance(loader.dataset, IterableDataset)


def check_can_seed(loader: DataLoader[Any]) -> None:
    """Check that `seed_each_sample` can be used with a loader.

    Raises:
        UnsupportedError: If its dataset is iterable.
    """
    if not has_indices(loader):
        raise UnsupportedError(
            "seed_each_sample=True needs samples that have an index, and an iterable dataset has none. Leave it out: "
            "such a dataset draws from (seed, epoch) anyway, in the same way on all processes and after a resume."
        )


@overload
def skip_first_batches(dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader: ...
@overload
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]: ...
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader whose first pass starts `num_batches` in; its later passes are whole.

    The loader given stays usable. Of a prepared one the count of passes is shared: a pass over the loader returned is
    one over the data, and the next pass over either is the next epoch.

    Example:
        >>> rest = skip_first_batches(DataLoader(range(6), batch_size=2), 1)
        >>> [batch.tolist() for batch in rest]
        [[2, 3], [4, 5]]
    """
    check_count("num_batches", num_batches, at_least=0)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.starting_at(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(f"skip_first_batches takes a DataLoader, got {type(dataloader).__name__}.")
    if isinstance(dataloader.dataset, IterableDataset):
        return prepare_data_loader(dataloader, num_processes=1, process_index=0).starting_at(num_batches)
    skipping = copy.copy(dataloader)
    name = _index_source(dataloader)
    skipping.__dict__["_iterator"] = None
    skipping.__dict__[name] = SkipBatchSampler(getattr(dataloader, name), num_batches, every_pass=False)
    return skipping


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, also from inside of a batch sampler.

    Example:
        >>> type(get_sampler(DataLoader(range(3), shuffle=True))).__name__
        'RandomSampler'
    """
    source = getattr(dataloader, _index_source(dataloader))
    if isinstance(source, BatchSamplerShard):
        source = source.batch_sampler
    is_single = dataloader.batch_sampler is None and not isinstance(source, BatchSampler)
    return source if is_single else getattr(source, "sampler", None)


@dataclass(frozen=True, kw_only=True)
class _Split:
    """Among whom a loader is split, and how."""

    processes: int
    index: int
    split_batches: bool
    even_batches: bool
    slice_function: Callable[..., Any] | None
    dispatches: bool
    group: ProcessGroup

    def __post_init__(self) -> None:
        check_count("num_processes", self.processes)
        if not 0 <= self.index < self.processes:
            raise ConfigurationError(
                f"process_index={self.index} is none of {self.processes} processes. Known: 0 to {self.processes - 1}."
            )
        if self.dispatches and not self.is_real:
            raise ConfigurationError(
                f"dispatch_batches=True sends batches between the {self.group.size} processes there are, not between "
                f"num_processes={self.processes}. Leave num_processes and process_index out."
            )

    @property
    def is_real(self) -> bool:
        """Whether these are the processes there are, which can talk to one another."""
        return (self.processes, self.index) == (self.group.size, self.group.rank)

    def agreed_seed(self, seed: int) -> int:
        """Return the seed of the first process."""
        return self.group.broadcast_objects([seed])[0] if self.is_real else seed

    def sharing(self, batch_size: int | None, drop_last: bool) -> Sharing:
        """Return how this process shares batches with the others."""
        return Sharing.of_batches(
            batch_size, self.processes, self.index, self.split_batches, drop_last, self.even_batches
        )

    def slicing(self, batch_size: int | None, come_ready: bool) -> Slicing | None:
        """Return how batches are cut for the others, if they have to be."""
        if not self.split_batches or not (come_ready or self.slice_function is not None):
            return None
        if not self.dispatches:
            if not come_ready:
                return None
            raise ConfigurationError(
                "split_batches=True cannot split batches that come ready (batch_size=None). Leave it out, or let the "
                "first process cut them by dispatch_batches=True."
            )
        self.sharing(batch_size, drop_last=False)
        return Slicing(processes=self.processes, batch_size=batch_size, function=self.slice_function)


def _map_reader(loader: DataLoader[Any], split: _Split, seed_each_sample: bool) -> tuple[Reader, Slicing | None]:
    name = _index_source(loader)
    source: Any = getattr(loader, name)
    by_samples = iterates_as(source, "BatchSampler")
    if by_samples:
        sampler, source = source.sampler, copy.copy(source)
        source.sampler = seedable(sampler)
    else:
        source = seedable(source)
    slicing = split.slicing(source.batch_size if by_samples else None, come_ready=name == "sampler" and not by_samples)
    if slicing is None:
        shard = BatchSamplerShard(source, split.processes, split.index, split.split_batches, split.even_batches)
    else:
        shard = BatchSamplerShard(source, even_batches=split.even_batches)
        shard.fill_for(split.processes if by_samples else 1)
    return MapReader(loader, name, shard, seed_each_sample), slicing


def _iterable_reader(loader: DataLoader[Any], split: _Split, seed_each_sample: bool) -> tuple[Reader, Slicing | None]:
    if seed_each_sample:
        check_can_seed(loader)
    is_batched = loader.batch_sampler is not None
    sharing = split.sharing(loader.batch_size if is_batched else None, loader.drop_last)
    slicing = split.slicing(loader.batch_size if is_batched else None, come_ready=not is_batched)
    is_split = is_split_already(loader.dataset) and split.processes > 1
    if is_split and split.dispatches:
        raise ConfigurationError(
            "dispatch_batches=True has the first process read for all, but each process has samples of its own from "
            f"this {type(loader.dataset).__name__}. Do not split it, or leave dispatch_batches out."
        )
    if is_split:
        sharing = replace(sharing, processes=1, ranks=(0,))
        group = split.group if split.is_real else None
        return IterableReader(loader, sharing, split.index, split.processes, split.processes, group), None
    if slicing is not None:
        sharing = replace(sharing, share=loader.batch_size or 1, processes=1, ranks=(0,))
        sharing = replace(sharing, fill=sharing.fill and is_batched)
    return IterableReader(loader, sharing, split.index, split.processes), slicing


def _check(loader: Any, mesh: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"prepare_data_loader takes a DataLoader, got {type(loader).__name__}.")
    if getattr(loader, "_is_accelerate_prepared", False):
        raise PreparationError(f"This {type(loader).__name__} is prepared already. Use it as it is.")
    if mesh is not None:
        raise UnsupportedError("torch_device_mesh is not supported by this version. Leave it out.")
    if getattr(loader, "next_iter_state", None) is not None:
        raise PreparationError(
            f"A state was loaded into this {type(loader).__name__} before it was prepared, where it would be lost. "
            "Load the state of the prepared loader into the prepared loader."
        )
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise PreparationError(
                f"This loader's {type(sampler).__name__} shares samples out among {sampler.num_replicas} processes, "
                "which preparing does too. Give the plain sampler: shuffle=True, or the one inside."
            )
    if loader.num_workers > 0 and not loader.in_order:
        warnings.warn(
            "in_order=False: batches come in another order than samples were given out, so which of them a saved "
            "position has behind it is not exact.",
            stacklevel=3,
        )


def _group(num_processes: int | None, process_index: int | None) -> ProcessGroup:
    if num_processes is None or process_index is None or is_initialized():
        return PartialState().group
    return LoneProcess()


def _index_source(loader: DataLoader[Any]) -> str:
    """Return which attribute of a loader says what to read."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _seed(loader: DataLoader[Any]) -> int:
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.initial_seed
    generator = getattr(sampler, "generator", None) or loader.generator
    return positive_seed(generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed())


def _generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator that users mean by "generator"."""
    owners = (loader.dataset,) if isinstance(loader.dataset, IterableDataset) else (get_sampler(loader), loader)
    found = [getattr(owner, "generator", None) for owner in owners]
    return next((generator for generator in found if isinstance(generator, torch.Generator)), None)


def _kinds(rng_types: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> tuple[str | RNGType, ...]:
    return tuple(kind for kind in rng_types or () if generator is not None or kind != RNGType.GENERATOR)
