"""Columns of a dataset that the model does not take, left out of batches as Hugging Face's Trainer does."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_LABELS = ("label", "label_ids", "labels")


def taken_columns(trainer: "Trainer") -> frozenset[str]:
    """Return the arguments of the model's forward, and the names of labels."""
    models = [trainer.model] if isinstance(trainer.model, nn.Module) else trainer.model.values()
    names = {name for model in models for name in inspect.signature(_bare(model).forward).parameters}
    return frozenset({*names, *_LABELS, *(trainer.args.label_names or ())})


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter of PEFT


class UnusedColumnsRemoved:
    """Makes a batch of samples without the columns that the model does not take; samples without names stay.

    Args:
        collate_fn: Makes the batch.
        taken: The columns that stay.

    Example:
        >>> collate_fn = UnusedColumnsRemoved(list, frozenset({"x", "labels"}))
        >>> collate_fn([{"x": 1, "text": "one", "labels": 0}])
        [{'x': 1, 'labels': 0}]
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], taken: frozenset[str]) -> None:
        self.collate_fn, self.taken = collate_fn, taken

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch."""
        return self.collate_fn([self._kept(sample) for sample in samples])

    def _kept(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        kept = {name: value for name, value in sample.items() if name in self.taken}
        if sample and not kept:
            raise ConfigurationError(
                f"remove_unused_columns=True leaves no column: the dataset has {', '.join(map(str, sample))}, and the "
                f"model takes {', '.join(sorted(self.taken))}. Rename the columns, or give remove_unused_columns=False."
            )
        return kept
