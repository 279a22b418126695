"""Preparing a DataLoader for several ranks, and skipping its first batches."""

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
    """Return a loader that reads this rank's share of a user's loader; the user's loader does not change.

    The order of a shuffled loader is a function of seed and epoch, the same for any number of ranks. Each pass is
    the next epoch, or the one passed to `set_epoch`.

    Args:
        dataloader: The user's loader.
        device: Where batches are moved to, with `put_on_device`.
        num_processes: How many ranks share it; by default the world size.
        process_index: The rank to read for; by default this rank.
        split_batches: The loader's batch size is that of all ranks together; each rank takes its slice.
        put_on_device: Move batches to `device`.
        rng_types: The generators to synchronize between the ranks at the start of a pass.
        dispatch_batches: Rank 0 reads, and sends the other ranks their batches. Off by default.
        even_batches: Fill the last round with the first samples, so that all ranks have the same number
            of full batches.
        slice_fn_for_dispatch: With `dispatch_batches` and `split_batches`: cuts a rank's slice from a batch; called
            with the batch, a slice, `process_index` and `num_processes`.
        use_seedable_sampler: Accepted for compatibility: the order is always a function of seed and epoch.
        data_seed: The seed of the order; by default that of the sampler's generator, or else torch's seed. All ranks
            use the seed of rank 0.
        non_blocking: Do not wait for copies to the device.
        use_stateful_dataloader: Accepted for compatibility: there is always a `state_dict`.
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


@overload
def skip_first_batches(dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader: ...
@overload
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]: ...
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader whose first pass skips `num_batches` batches; later passes are whole.

    You can go on using the other loader. The two loaders of a prepared one share the count of passes: a pass over
    either counts, and the next pass over either is the next epoch.

    Example:
        >>> rest = skip_first_batches(DataLoader(range(6), batch_size=2), 1)
        >>> [batch.tolist() for batch in rest]
        [[2, 3], [4, 5]]
    """
    check_count("num_batches", num_batches, at_least=0)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.starting_at(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(f"skip_first_batches needs a DataLoader (got {type(dataloader).__name__}).")
    if isinstance(dataloader.dataset, IterableDataset):
        return prepare_data_loader(dataloader, num_processes=1, process_index=0).starting_at(num_batches)
    skipping = copy.copy(dataloader)
    name = _index_source(dataloader)
    skipping.__dict__["_iterator"] = None
    skipping.__dict__[name] = SkipBatchSampler(getattr(dataloader, name), num_batches, every_pass=False)
    return skipping


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, also if it is inside a batch sampler.

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
    """How a loader is split between ranks."""

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

    def agreed_seed(self, seed: int) -> int:
        """Return the seed of rank 0."""
        return self.group.broadcast_objects([seed])[0] if self.is_real else seed

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


def _check(loader: Any, mesh: Any) -> None:
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


def _group(num_processes: int | None, process_index: int | None) -> ProcessGroup:
    if num_processes is None or process_index is None or is_initialized():
        return PartialState().group
    return LoneProcess()


def _index_source(loader: DataLoader[Any]) -> str:
    """Return the name of the loader's attribute that yields what to read."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _seed(loader: DataLoader[Any]) -> int:
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.initial_seed
    generator = getattr(sampler, "generator", None) or loader.generator
    return positive_seed(generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed())


def _generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator that "generator" means in `rng_types`."""
    owners = (loader.dataset,) if isinstance(loader.dataset, IterableDataset) else (get_sampler(loader), loader)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def _kinds(rng_types: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> tuple[str | RNGType, ...]:
    return tuple(kind for kind in rng_types or () if generator is not None or kind != RNGType.GENERATOR)
