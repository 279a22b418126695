"""Preparing a DataLoader for several ranks, and skipping its first batches."""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data_loader.build_reader import RankSplit, check_preparable
from trainer_lib.data_loader.order.batch_sampler_shard import get_sampler, index_source
from trainer_lib.data_loader.order.data_rng import positive_seed
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler, SkipBatchSampler
from trainer_lib.data_loader.prepared_loader import Delivery, PreparedLoader
from trainer_lib.data_loader.shard_loader import DataLoaderShard
from trainer_lib.data_loader.stateful_loader import stateful_kind
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.options.base import check_count
from trainer_lib.options.enums import RNGType
from trainer_lib.process_group import LoneProcess, ProcessGroup
from trainer_lib.state.partial_state import PartialState, is_initialized

if TYPE_CHECKING:
    from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher

_logger = get_logger(__name__)


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
    low_memory_shuffle: bool = False,
) -> "DataLoaderShard | DataLoaderDispatcher":
    """Return a loader that reads this rank's share of a user's loader; the user's loader does not change.

    The order is the one that the loader has without being prepared: a shuffle is drawn from its generator, or from
    torch's global one (of rank 0). It is the same for any number of ranks, which share it batch by batch.

    Args:
        dataloader: The user's loader.
        device: Where batches are moved to, with `put_on_device`.
        num_processes: How many ranks share it; by default those that read different batches: all, unless several
            ranks hold parts of one replica of the model.
        process_index: The one of them to read for; by default this rank.
        split_batches: The loader's batch size is that of all ranks together; each rank takes its slice.
        put_on_device: Move batches to `device`.
        rng_types: The generators to synchronize between the ranks at the start of a pass.
        dispatch_batches: Rank 0 reads, and sends the other ranks their batches. Off by default.
        even_batches: Fill the last round with the first samples, so that all ranks have the same number
            of full batches.
        slice_fn_for_dispatch: With `dispatch_batches` and `split_batches`: cuts a rank's slice from a batch; called
            with the batch, a slice, `process_index` and `num_processes`.
        use_seedable_sampler: Draw a shuffle from a generator that is seeded with seed + epoch, as Accelerate does.
        data_seed: The seed of an order that is a function of seed and epoch (`use_seedable_sampler`,
            `low_memory_shuffle`); by default torch's seed. All ranks use the seed of rank 0.
        non_blocking: Do not wait for copies to the device.
        use_stateful_dataloader: Return an instance of torchdata's `StatefulDataLoader`. All prepared loaders have a
            `state_dict`.
        torch_device_mesh: Not supported by this version.
        seed_each_sample: Seed the generators before each sample of a map-style dataset from (seed, epoch, index).
        low_memory_shuffle: Compute a shuffle from seed and epoch instead of listing it, for a dataset whose permutation
            does not fit into memory.

    Example:
        >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader], loader.rows
        ([[2, 3], [1, 2]], None)
    """
    check_preparable(dataloader, torch_device_mesh)
    if slice_fn_for_dispatch is not None and not (dispatch_batches and split_batches):
        _logger.warning_once(
            "slice_fn_for_dispatch is ignored: no batch is cut. It cuts what rank 0 reads for all ranks, with "
            "dispatch_batches=True and split_batches=True."
        )
    group, world = _groups(num_processes, process_index)
    split = RankSplit(
        processes=group.size if num_processes is None else num_processes,
        index=group.rank if process_index is None else process_index,
        split_batches=split_batches,
        even_batches=even_batches,
        slice_function=slice_fn_for_dispatch,
        dispatches=bool(dispatch_batches),
        group=group,
        world=world,
    )
    delivery = Delivery(
        device=device if put_on_device else None,
        non_blocking=non_blocking,
        rng_types=_kinds(rng_types, _generator(dataloader)),
        generator=_generator(dataloader),
    )
    seed = _seed(dataloader, use_seedable_sampler) if data_seed is None else positive_seed(data_seed)
    (seed,) = split.own_world.broadcast_objects([seed])
    source = split.reader(dataloader, seed_each_sample, use_seedable_sampler, low_memory_shuffle)
    kind = _kind(split.dispatches)
    kind = stateful_kind(kind) if use_stateful_dataloader else kind
    return kind.around(source, split, delivery, seed)


def _kind(dispatches: bool) -> "type[DataLoaderShard | DataLoaderDispatcher]":
    if not dispatches:
        return DataLoaderShard
    from trainer_lib.data_loader.dispatch_loader import DataLoaderDispatcher

    return DataLoaderDispatcher


@overload
def skip_first_batches(dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader: ...
@overload
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]: ...
def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader whose first pass skips `num_batches` batches; later passes are whole.

    The given loader stays usable. If it is a prepared one, both loaders share the count of passes: a pass over either
    counts, and the next pass over either is the next epoch.

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
    name = index_source(dataloader)
    skipping.__dict__["_iterator"] = None
    skipping.__dict__[name] = SkipBatchSampler(getattr(dataloader, name), num_batches, every_pass=False)
    return skipping


def _groups(num_processes: int | None, process_index: int | None) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the ranks that read different batches, and all ranks."""
    if num_processes is None or process_index is None or is_initialized():
        state = PartialState()
        return state.data_group, state.group
    return LoneProcess(), LoneProcess()


def _seed(loader: DataLoader[Any], seedable: bool) -> int:
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.initial_seed
    generator = getattr(sampler, "generator", None) or loader.generator
    if isinstance(generator, torch.Generator) and not seedable:  # Accelerate's seed is torch's
        return positive_seed(generator.initial_seed())
    return positive_seed(torch.initial_seed())


def _generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator that "generator" means in `rng_types`."""
    owners = (loader.dataset,) if isinstance(loader.dataset, IterableDataset) else (get_sampler(loader), loader)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def _kinds(rng_types: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> tuple[str | RNGType, ...]:
    return tuple(kind for kind in rng_types or () if generator is not None or kind != RNGType.GENERATOR)
