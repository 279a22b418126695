"""Dropping the columns of a dataset that the model does not take, as Hugging Face's Trainer does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.forwards import forward_signature
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.trainer.trainer_interface import TrainerInterface

_LABELS = ("label", "label_ids", "labels")


def used_columns(trainer: TrainerInterface) -> frozenset[str]:
    """Return the names of the arguments of the model's forward, and of labels."""
    models = [trainer.model] if isinstance(trainer.model, nn.Module) else trainer.model.values()
    names = {name for model in models for name in forward_signature(without_adapter(model)).parameters}
    return frozenset({*names, *_LABELS, *(trainer.args.label_names or ())})


class DropUnusedColumns:
    """Drops the columns that the model does not take, then collates; samples without names stay unchanged.

    Args:
        collate_fn: Collates the samples.
        used: The columns that stay.

    Example:
        >>> collate_fn = DropUnusedColumns(list, frozenset({"x", "labels"}))
        >>> collate_fn([{"x": 1, "text": "one", "labels": 0}])
        [{'x': 1, 'labels': 0}]
    """

    collate_fn: Callable[[list[Any]], Any]
    used: frozenset[str]

    def __init__(self, collate_fn: Callable[[list[Any]], Any], used: frozenset[str]) -> None:
        self.collate_fn, self.used = collate_fn, used

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch."""
        return self.collate_fn([self._without_unused(sample) for sample in samples])

    def _without_unused(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        kept = {name: value for name, value in sample.items() if name in self.used}
        if sample and not kept:
            raise ConfigurationError(
                f"remove_unused_columns=True drops all columns: the dataset has {', '.join(map(str, sample))}, and the "
                f"model takes {', '.join(sorted(self.used))}. Rename the columns, or give remove_unused_columns=False."
            )
        return kept
