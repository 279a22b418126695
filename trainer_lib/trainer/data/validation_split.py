"""Rows of the training data held out for evaluation: the same for each seed, on each process and after a resume."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.trainer.data.datasets import as_dataset, length_of

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_SEED = 0  # not that of the run: runs of several seeds are compared on the same rows


def split_for(trainer: "Trainer") -> tuple[Any, Any]:
    """Return the rows that a trainer trains on and those that it evaluates on, as `validation_split` says.

    Raises:
        ConfigurationError: If there is an `eval_dataset` too, or the data cannot be split.
    """
    share = trainer.args.validation_split
    assert share is not None
    if trainer.eval_dataset is not None:
        raise ConfigurationError(
            f"validation_split={share:g} and eval_dataset=… both say what is evaluated. Leave one of them out."
        )
    return split(trainer.train_dataset, share)


def split(data: Any, share: float) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate on, each in the order of the data.

    Args:
        data: The training data: anything with an index that `Trainer(train_dataset=…)` takes.
        share: The part that is evaluated on.

    Raises:
        ConfigurationError: If there are fewer than two rows, or a ready loader is given.
        UnsupportedError: If the data is iterable.

    Example:
        >>> train, held_out = split(list(range(10)), 0.2)
        >>> len(train), len(held_out), sorted([*train, *held_out]) == list(range(10))
        (8, 2, True)
    """
    told = f"validation_split={share:g}"
    if isinstance(data, DataLoader):
        raise ConfigurationError(f"{told} splits a dataset, and train_dataset is a DataLoader. Give its dataset.")
    dataset = as_dataset(data, "train_dataset")
    length = length_of(dataset)
    if isinstance(dataset, IterableDataset) or length is None:
        raise UnsupportedError(
            f"{told} needs samples that have an index, and train_dataset is a {type(data).__name__}, which is iterable."
            " Give eval_dataset."
        )
    if length < 2:
        raise ConfigurationError(f"{told} needs two samples or more, and train_dataset has {length}.")
    count = min(max(1, round(share * length)), length - 1)
    order = np.random.default_rng(_SEED).permutation(length)
    held_out, rest = np.sort(order[:count]).tolist(), np.sort(order[count:]).tolist()
    if hasattr(dataset, "select") and hasattr(dataset, "column_names"):  # of Hugging Face, which stays one
        return dataset.select(rest), dataset.select(held_out)
    return Subset(dataset, rest), Subset(dataset, held_out)
