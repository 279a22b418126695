"""Rows of the training data held out for evaluation: the same for all seeds, on all ranks and after a resume."""

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.trainer.trainer_interface import TrainerInterface

_SEED = 0  # not the run's seed: runs with different seeds evaluate on the same rows


def split_for(trainer: TrainerInterface) -> tuple[Any, Any]:
    """Return the rows that a trainer trains on and the rows that it evaluates on, by `validation_split`.

    Raises:
        ConfigurationError: If there is also an `eval_dataset`, or the data cannot be split.
    """
    share = trainer.args.validation_split
    assert share is not None
    if trainer.eval_dataset is not None:
        raise ConfigurationError(
            f"validation_split={share:g} and eval_dataset=… both set the evaluation data. Leave one of them out."
        )
    return split(trainer.train_dataset, share)


def split(data: Any, share: float) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate on, each in the order of the data.

    Args:
        data: The training data: any map-style data that `Trainer(train_dataset=…)` takes.
        share: The fraction to evaluate on.

    Raises:
        ConfigurationError: If there are fewer than two rows, or the data is a `DataLoader`.
        UnsupportedError: If the data is iterable.

    Example:
        >>> train, held_out = split(list(range(10)), 0.2)
        >>> len(train), len(held_out), sorted([*train, *held_out]) == list(range(10))
        (8, 2, True)
    """
    from trainer_lib.foundation.lengths import length_of
    from trainer_lib.trainer.data.datasets import as_dataset

    setting = f"validation_split={share:g}"
    if isinstance(data, DataLoader):
        raise ConfigurationError(f"{setting} splits a dataset, and train_dataset is a DataLoader. Give its dataset.")
    dataset = as_dataset(data, "train_dataset")
    length = length_of(dataset)
    if isinstance(dataset, IterableDataset) or length is None:
        raise UnsupportedError(
            f"{setting} needs a map-style dataset, and train_dataset is a {type(data).__name__}, which is iterable. "
            "Give eval_dataset."
        )
    if length < 2:
        raise ConfigurationError(f"{setting} needs at least two samples, and train_dataset has {length}.")
    count = min(max(1, round(share * length)), length - 1)
    order = np.random.default_rng(_SEED).permutation(length)
    held_out, rest = np.sort(order[:count]).tolist(), np.sort(order[count:]).tolist()
    if hasattr(dataset, "select") and hasattr(dataset, "column_names"):  # a dataset of Hugging Face stays one
        return dataset.select(rest), dataset.select(held_out)
    return Subset(dataset, rest), Subset(dataset, held_out)
