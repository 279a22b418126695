"""This file is making the loaders of training and evaluation from data. They are not shared out yet."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, Subset

from trainer_lib.data_loader.order.data_rng import RandomStream, derived_seed, positive_seed
from trainer_lib.data_loader.order.epoch_order import iterates_as
from trainer_lib.data_loader.order.samplers import SeedableRandomSampler
from trainer_lib.data_loader.readers.sample_stream import is_split_already
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.collate import PaddingCollate, collate
from trainer_lib.trainer.data.datasets import Columns, as_dataset, length_of
from trainer_lib.trainer.data.limit_batches import limited_dataset, limited_loader
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
    option: str = "train_dataset",
) -> DataLoader[Any]:
    """Return the loader of training data, to be prepared by an `Accelerator`.

    A ready `DataLoader` stays as it is, but for `limit_batches` and `overfit_batches`, which make a copy of it.
    Iterable datasets come in their own order.

    Args:
        dataset: A dataset of torch or Hugging Face, a tuple or dict of tensors or arrays, a list of samples, a loader.
        batch_size: The samples of a batch, of one process.
        shuffle: In another random order in each pass, a function of `seed` and epoch.
        collate_fn: Makes a batch of samples; by default `collate`.
        processing_class: A tokenizer (or what has one), which pads samples that have `input_ids`.
        num_workers: Processes that read samples; 0: this one does.
        pin_memory: Have batches in memory that an accelerator copies from faster; by default where there is one.
        prefetch_factor: The batches that each worker reads ahead.
        persistent_workers: Keep the workers from pass to pass.
        drop_last: Leave out a last round that is not complete.
        limit_batches: How many batches a process reads in a pass, at most.
        overfit_batches: Read the first so many batches in each pass, always the same.
        group_by_length: Bring samples of similar length together.
        length_column: Where the length of a sample stands; else that of its `input_ids` is taken.
        sample_weights: Draw samples with replacement, each as often as its weight says.
        seed: The seed of the order; by default torch's.
        num_processes: Among how many processes the loader will be shared.
        option: What errors call the dataset.

    Raises:
        ConfigurationError: If there is no sample, no whole batch, or options do not go together.

    Example:
        >>> loader = train_loader((torch.arange(4.0), torch.tensor([0, 1, 0, 1])), batch_size=4, shuffle=False)
        >>> next(iter(loader))
        [tensor([0., 1., 2., 3.]), tensor([0, 1, 0, 1])]
    """
    _check_together(limit_batches, overfit_batches, group_by_length, sample_weights, shuffle)
    chooses = "sample_weights" if sample_weights is not None else "group_by_length" if group_by_length else None
    if isinstance(dataset, DataLoader):
        if chooses or drop_last:
            raise ConfigurationError(
                f"{chooses or 'drop_last'} is for a loader that is made of a dataset, and {option} is a ready "
                "DataLoader. Set it there, or give the dataset."
            )
        return _ready(dataset, limit_batches, overfit_batches, num_processes, option)
    check_count("batch_size", batch_size)
    data = as_dataset(dataset, option)
    limit = limit_batches if overfit_batches is None else overfit_batches
    wanted = None if limit is None else limit * batch_size * num_processes
    if isinstance(data, IterableDataset) and overfit_batches is not None:
        data = _opening(data, wanted or 0, seed, option)
    sampler: Sampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        lengths = lengths_of(data, length_column, option) if group_by_length else None
        sampler = _order(data, shuffle and overfit_batches is None, sample_weights, lengths, seed, option)
        sampler = sampler if wanted is None else first_samples(sampler, wanted)
    elif chooses:
        raise ConfigurationError(
            f"{chooses} needs samples that can be had in any order, and {option} is iterable: its samples come as they "
            "come."
        )
    elif limit is not None:
        data = limited_dataset(data, limit, batch_size, num_processes)
    # What an iterable dataset draws is seeded from its loader's generator, and has no sampler to be seeded from.
    seeded = sampler is None and seed is not None
    _check_whole_batch(data, batch_size * num_processes, drop_last, option)
    return _loader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        generator=torch.Generator().manual_seed(positive_seed(seed or 0)) if seeded else None,
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
    option: str = "eval_dataset",
) -> DataLoader[Any]:
    """Return the loader of data that is evaluated, in the order of the data, to be prepared by an `Accelerator`.

    The arguments are those of `train_loader`.

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
        option=option,
    )


def dropped_samples(loader: DataLoader[Any]) -> int:
    """Return how many samples `drop_last` leaves out of a pass on one process; 0 where that is not known.

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


def _check_together(
    limit: int | None, overfit: int | None, group_by_length: bool, weights: Sequence[float] | None, shuffle: bool
) -> None:
    for name, value in (("limit_batches", limit), ("overfit_batches", overfit)):
        if value is not None:
            check_count(name, value)
    given = {
        "limit_batches": limit is not None,
        "overfit_batches": overfit is not None,
        "group_by_length=True": group_by_length,
        "sample_weights": weights is not None,
        "shuffle=False": not shuffle,
    }
    for one, other, why in (
        ("limit_batches", "overfit_batches", "both say how many batches a pass has"),
        ("overfit_batches", "group_by_length=True", "the batches are always the first ones"),
        ("overfit_batches", "sample_weights", "the batches are always the first ones"),
        ("group_by_length=True", "sample_weights", "each is an order of its own"),
        ("group_by_length=True", "shuffle=False", "it is a random order"),
        ("sample_weights", "shuffle=False", "samples are drawn at random"),
    ):
        if given[one] and given[other]:
            raise ConfigurationError(f"{one} and {other} do not go together: {why}. Leave one of them out.")


def _ready(
    loader: DataLoader[Any], limit: int | None, overfit: int | None, num_processes: int, option: str
) -> DataLoader[Any]:
    if length_of(loader.dataset) == 0:
        raise ConfigurationError(f"{option} is empty: its DataLoader's {type(loader.dataset).__name__} has no sample.")
    if overfit is None:
        return loader if limit is None else limited_loader(loader, limit, num_processes)
    if isinstance(loader.dataset, IterableDataset) or not iterates_as(loader.batch_sampler, "BatchSampler"):
        raise UnsupportedError(
            f"overfit_batches={overfit} reads the first samples again and again, and this DataLoader has "
            f"{'an iterable dataset' if isinstance(loader.dataset, IterableDataset) else 'batches of its own making'}. "
            "Give the dataset instead of a loader, or use limit_train_batches."
        )
    limited = limited_loader(loader, overfit, num_processes)
    sampler = SequentialSampler(range(min(len(loader.dataset), len(limited.sampler))))  # type: ignore[arg-type]
    limited.batch_sampler.sampler = sampler  # type: ignore[union-attr]
    limited.__dict__["sampler"] = sampler
    return limited


def _opening(dataset: Any, count: int, seed: int | None, option: str) -> list[Any]:
    """Return the first samples of an iterable dataset, which all processes read alike."""
    if is_split_already(dataset):
        raise UnsupportedError(
            f"overfit_batches needs samples that all processes share, and each has samples of its own from {option}. "
            "Give a dataset that is not split, or use limit_train_batches."
        )
    with RandomStream(derived_seed(torch.initial_seed() if seed is None else positive_seed(seed), "opening")):
        samples = list(islice(iter(dataset), count))
    if not samples:
        raise ConfigurationError(f"{option} is empty: there is no sample in this {type(dataset).__name__}.")
    return samples


def _order(
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
            raise ConfigurationError(f"sample_weights has {len(weights)} weights, and {option} {len(data)} samples.")
        return WeightedSampler(weights, seed=seed)
    if lengths is not None:
        return LengthGroupedSampler(lengths, seed=seed)
    return SeedableRandomSampler(data, data_seed=seed) if shuffle else SequentialSampler(data)


def _check_whole_batch(data: Any, round_size: int, drop_last: bool, option: str) -> None:
    size = length_of(data)
    if drop_last and size is not None and size < round_size:
        raise ConfigurationError(
            f"drop_last=True would leave nothing: {option} has {size} samples, and a batch over all processes has "
            f"{round_size}. Leave it out, or take smaller batches."
        )


def collator(collate_fn: Collate | None, processing_class: Any) -> Callable[..., Any]:
    """Return what makes batches of samples, where none is given too."""
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
        raise ConfigurationError(f"{name} is about workers, and there are none. Give num_workers, or leave it out.")
    if collate_fn is collate:
        data = _gathering(data)
    return DataLoader(
        data,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=_pins(data) if pin_memory is None else pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        **options,
    )


def _gathering(data: Any) -> Any:
    """Return arrays, or some of their rows, so that batches are taken from them as a whole."""
    if type(data) is Subset and isinstance(data.dataset, Columns):
        return Subset(data.dataset.gathering(), data.indices)
    return data.gathering() if isinstance(data, Columns) else data


def _pins(data: Any) -> bool:
    """Whether there is an accelerator that copies from pinned memory, and something to copy."""
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type == "mps":
        return False
    columns = data.columns.values() if isinstance(data, Columns) else ()
    return all(one.device.type == "cpu" for one in columns if isinstance(one, torch.Tensor))
