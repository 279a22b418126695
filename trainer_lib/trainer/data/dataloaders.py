"""DataLoaders for training and evaluation, built from any kind of data, before an `Accelerator` prepares them."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, Subset

from trainer_lib.data_loader.order.data_rng import RandomStream, derived_seed, positive_seed
from trainer_lib.data_loader.order.epoch_order import iterates_as
from trainer_lib.data_loader.order.epoch_start import started
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.device_types import can_pin_memory
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.collate import PaddingCollate, RenamedLabels, collate
from trainer_lib.trainer.data.datasets import Columns, as_dataset
from trainer_lib.trainer.data.train_samplers import LengthGroupedSampler, WeightedSampler, first_samples, lengths_of

Collate = Callable[[list[Any]], Any]


def train_loader(
    dataset: Any,
    *,
    batch_size: int = 8,
    shuffle: bool = True,
    collate_fn: Collate | None = None,
    processing_class: Any = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    drop_last: bool = False,
    limit_batches: int | None = None,
    overfit_batches: int | None = None,
    group_by_length: bool = False,
    length_column: str = "length",
    sample_weights: Sequence[float] | None = None,
    seed: int | None = None,
    num_processes: int = 1,
    longest_samples_first: bool = False,
    option: str = "train_dataset",
) -> DataLoader[Any]:
    """Return the loader of training data, for an `Accelerator` to prepare.

    A ready `DataLoader` is returned unchanged, unless `limit_batches` or `overfit_batches` need a modified copy.
    Iterable datasets keep their own order.

    Args:
        dataset: A dataset of torch or Hugging Face, a tuple or dict of tensors or arrays, a list of samples, or a
            `DataLoader`.
        batch_size: The samples in a batch of one rank.
        shuffle: Whether each epoch has a new random order, drawn from `seed` + epoch as by Hugging Face's Trainer.
        collate_fn: Collates a list of samples; by default `collate`.
        processing_class: A tokenizer, or a processor that has one, which pads samples that have `input_ids`.
        num_workers: Worker processes that read samples; 0 reads them in this process.
        pin_memory: Whether batches are in page-locked memory, from which accelerators copy faster; by default if there
            is an accelerator.
        prefetch_factor: Batches that each worker reads ahead.
        persistent_workers: Whether workers stay alive between epochs.
        drop_last: Whether to drop the last batches of an epoch if they are not full on all ranks.
        limit_batches: Batches that a rank reads per epoch, at most.
        overfit_batches: Reads only this many first batches, the same ones in each epoch.
        group_by_length: Whether a batch has samples of similar length.
        length_column: The field that holds the length of a sample; without it the length of `input_ids` counts.
        sample_weights: Draws samples with replacement, in proportion to these weights.
        seed: The seed of the order; by default torch's seed.
        num_processes: The world size of the prepared loader.
        longest_samples_first: Whether to read the samples in the order of their lengths, if these are known.
        option: The name of the dataset in errors.

    Raises:
        ConfigurationError: If there is no sample or no full batch, or if options contradict each other.

    Example:
        >>> loader = train_loader((torch.arange(4.0), torch.tensor([0, 1, 0, 1])), batch_size=4, shuffle=False)
        >>> next(iter(loader))
        [tensor([0., 1., 2., 3.]), tensor([0, 1, 0, 1])]
    """
    _check_consistency(limit_batches, overfit_batches, group_by_length, sample_weights, shuffle)
    order_option = "sample_weights" if sample_weights is not None else "group_by_length" if group_by_length else None
    if isinstance(dataset, DataLoader):
        if order_option or drop_last:
            raise ConfigurationError(
                f"{order_option or 'drop_last'} has no effect on a ready DataLoader, and {option} is one. Set it in "
                "the DataLoader, or give the dataset."
            )
        return _limited_ready_loader(dataset, limit_batches, overfit_batches, num_processes, option)
    check_count("batch_size", batch_size)
    limit = limit_batches if overfit_batches is None else overfit_batches
    max_samples = None if limit is None else limit * batch_size * num_processes
    data = as_dataset(dataset, option)
    if isinstance(data, IterableDataset) and overfit_batches is not None:
        data = _read_first_samples(data, max_samples or 0, seed, option)
    sampler, generator = None, None
    if isinstance(data, IterableDataset):
        _refuse_order(order_option, option)
        data = _first_batches(data, limit, batch_size, num_processes)
        # Without a sampler, the loader's generator seeds the random numbers of workers.
        generator = None if seed is None else torch.Generator().manual_seed(positive_seed(seed))
    else:
        sampler = _longest_first(data, length_column, max_samples) if longest_samples_first else None
        if sampler is None:
            lengths = lengths_of(data, length_column, option) if group_by_length else None
            sampler = _make_sampler(data, shuffle and overfit_batches is None, sample_weights, lengths, seed, option)
            sampler = sampler if max_samples is None else first_samples(sampler, max_samples)
    _check_whole_batch(data, batch_size * num_processes, drop_last, option)
    return _loader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        generator=generator,
        drop_last=drop_last,
        collate_fn=collator(collate_fn, processing_class),
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
    )


def eval_loader(
    dataset: Any,
    *,
    batch_size: int = 8,
    collate_fn: Collate | None = None,
    processing_class: Any = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    limit_batches: int | None = None,
    num_processes: int = 1,
    longest_samples_first: bool = False,
    length_column: str = "length",
    option: str = "eval_dataset",
) -> DataLoader[Any]:
    """Return the loader of evaluation data, in the order of the data or by length, for an `Accelerator` to prepare.

    It takes the same arguments as `train_loader`.

    Example:
        >>> [batch.tolist() for batch in eval_loader(torch.arange(5), batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """
    return train_loader(
        dataset,
        batch_size=batch_size,
        shuffle=False,
        collate_fn=collate_fn,
        processing_class=processing_class,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        limit_batches=limit_batches,
        num_processes=num_processes,
        longest_samples_first=longest_samples_first,
        length_column=length_column,
        option=option,
    )


def dropped_samples(loader: DataLoader[Any]) -> int:
    """Return how many samples `drop_last` drops per epoch on one rank; 0 if unknown.

    Example:
        >>> dropped_samples(DataLoader(range(5), batch_size=2, drop_last=True))
        1
    """
    if isinstance(loader.dataset, IterableDataset):
        source, drops, size = loader.dataset, loader.drop_last, loader.batch_size
    elif iterates_as(loader.batch_sampler, "BatchSampler"):
        batches: Any = loader.batch_sampler
        source, drops, size = batches.sampler, batches.drop_last, batches.batch_size
    else:
        return 0
    return (length_of(source) or 0) % size if drops and size else 0


def _check_consistency(
    limit: int | None, overfit: int | None, group_by_length: bool, weights: Sequence[float] | None, shuffle: bool
) -> None:
    for name, value in (("limit_batches", limit), ("overfit_batches", overfit)):
        if value is not None:
            check_count(name, value)
    is_set = {
        "limit_batches": limit is not None,
        "overfit_batches": overfit is not None,
        "group_by_length=True": group_by_length,
        "sample_weights": weights is not None,
        "shuffle=False": not shuffle,
    }
    for first, second, reason in (
        ("limit_batches", "overfit_batches", "both set the number of batches per epoch"),
        ("overfit_batches", "group_by_length=True", "the batches are always the first ones"),
        ("overfit_batches", "sample_weights", "the batches are always the first ones"),
        ("group_by_length=True", "sample_weights", "both set the order of the samples"),
        ("group_by_length=True", "shuffle=False", "it needs a random order"),
        ("sample_weights", "shuffle=False", "samples are drawn at random"),
    ):
        if is_set[first] and is_set[second]:
            raise ConfigurationError(f"{first} and {second} contradict each other: {reason}. Leave one of them out.")


def _limited_ready_loader(
    loader: DataLoader[Any], limit: int | None, overfit: int | None, num_processes: int, option: str
) -> DataLoader[Any]:
    if length_of(loader.dataset) == 0:
        raise ConfigurationError(
            f"{option} is empty: the {type(loader.dataset).__name__} of its DataLoader has no samples."
        )
    count = limit if overfit is None else overfit
    if count is None:
        return loader
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if overfit is not None and (is_iterable or not iterates_as(loader.batch_sampler, "BatchSampler")):
        raise UnsupportedError(
            f"overfit_batches={overfit} needs a DataLoader whose first samples can be read again, and this one has "
            f"{'an iterable dataset' if is_iterable else 'a custom batch sampler'}. "
            "Give the dataset instead of a loader, or use limit_train_batches."
        )
    from trainer_lib.trainer.data.limit_batches import limited_loader

    limited = limited_loader(loader, count, num_processes)
    if overfit is None:
        return limited
    sampler = SequentialSampler(range(min(len(loader.dataset), len(limited.sampler))))  # type: ignore[arg-type]
    limited.batch_sampler.sampler = sampler  # type: ignore[union-attr]
    limited.__dict__["sampler"] = sampler
    return limited


def _read_first_samples(dataset: Any, count: int, seed: int | None, option: str) -> list[Any]:
    """Return the first samples of an iterable dataset, the same on all ranks."""
    if is_split_already(dataset):
        raise UnsupportedError(
            f"overfit_batches needs a dataset that yields the same samples on all ranks, and {option} is already split "
            "between them. Give a dataset that is not split, or use limit_train_batches."
        )
    with RandomStream(derived_seed(torch.initial_seed() if seed is None else positive_seed(seed), "opening")):
        samples = list(islice(started(iter(dataset)), count))
    if not samples:
        raise ConfigurationError(f"{option} is empty: this {type(dataset).__name__} has no samples.")
    return samples


def _refuse_order(order_option: str | None, option: str) -> None:
    """Raise if an option asks for an order of an iterable dataset."""
    if order_option is not None:
        raise ConfigurationError(
            f"{order_option} needs a map-style dataset, and {option} is iterable: it yields samples in its own order. "
            f"Leave {order_option} out, or give a map-style dataset."
        )


def _first_batches(data: Any, limit: int | None, batch_size: int, num_processes: int) -> Any:
    """Return an iterable dataset that ends after `limit` batches of each rank."""
    if limit is None:
        return data
    from trainer_lib.trainer.data.limit_batches import limited_dataset

    return limited_dataset(data, limit, batch_size, num_processes)


def _longest_first(data: Any, length_column: str, max_samples: int | None) -> Sampler[Any] | None:
    """Return a sampler by length; `None` if lengths are unknown or all equal."""
    from trainer_lib.trainer.data.eval_samplers import longest_first

    return longest_first(data, length_column, max_samples)


def _make_sampler(
    data: Any,
    shuffle: bool,
    weights: Sequence[float] | None,
    lengths: Sequence[int] | None,
    seed: int | None,
    option: str,
) -> Sampler[Any]:
    """Return the sampler of a map-style dataset."""
    if weights is not None:
        if len(weights) != len(data):
            raise ConfigurationError(
                f"sample_weights must have one weight per sample: it has {len(weights)}, and {option} has {len(data)} "
                "samples."
            )
        return WeightedSampler(weights, seed=seed)
    if lengths is not None:
        return LengthGroupedSampler(lengths, seed=seed)
    return SeedableRandomSampler(data, data_seed=seed) if shuffle else SequentialSampler(data)


def _check_whole_batch(data: Any, round_size: int, drop_last: bool, option: str) -> None:
    size = length_of(data)
    if drop_last and size is not None and size < round_size:
        raise ConfigurationError(
            f"drop_last=True would drop all samples: {option} has {size} of them, and the batches of all ranks "
            f"together need {round_size}. Leave drop_last out, or use a smaller batch size."
        )


def collator(collate_fn: Collate | None, processing_class: Any) -> Callable[..., Any]:
    """Return the collate function: `collate_fn`, or the default one."""
    if collate_fn is not None:
        if not callable(collate_fn):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(
                f"collate_fn={shown(collate_fn)} must be a function from a list of samples to a batch."
            )
        return collate_fn
    return collate if processing_class is None else PaddingCollate(processing_class)


def _loader(
    data: Any,
    *,
    collate_fn: Callable[..., Any],
    num_workers: int,
    pin_memory: bool | None,
    prefetch_factor: int | None,
    persistent_workers: bool,
    **options: Any,
) -> DataLoader[Any]:
    check_count("num_workers", num_workers, at_least=0)
    if prefetch_factor is not None:
        check_count("prefetch_factor", prefetch_factor)
    if not num_workers and (persistent_workers or prefetch_factor is not None):
        name = "persistent_workers" if persistent_workers else "prefetch_factor"
        raise ConfigurationError(
            f"{name} has no effect with num_workers=0. Give num_workers=1 or more, or leave it out."
        )
    if (collate_fn.collate_fn if isinstance(collate_fn, RenamedLabels) else collate_fn) is collate:
        data = _with_batched_reads(data)
    return DataLoader(
        data,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=_should_pin(data) if pin_memory is None else pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        **options,
    )


def _with_batched_reads(data: Any) -> Any:
    """Return columns, or a subset of their rows, so that a batch is read in one operation."""
    if type(data) is Subset and isinstance(data.dataset, Columns):
        return Subset(data.dataset.with_batched_reads(), data.indices)
    return data.with_batched_reads() if isinstance(data, Columns) else data


def _should_pin(data: Any) -> bool:
    """Whether an accelerator copies from pinned memory, and the data is on the CPU."""
    if not can_pin_memory():
        return False
    columns = data.columns.values() if isinstance(data, Columns) else ()
    return all(column.device.type == "cpu" for column in columns if isinstance(column, torch.Tensor))
