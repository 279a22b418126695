"""The named values of a batch, and which of them are targets."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.tensors.pytree import is_dataclass_value

_UNNAMED = frozenset({Tensor, list, tuple, PackedSequence})  # the last is a named tuple of torch's, and one value
LABEL_NAMES = ("labels", "label", "targets", "target", "y")
IGNORE_INDEX = -100  # the label that losses and metrics skip, as in torch and transformers
SHIFTED_LABELS = "shift_labels"  # labels that are those of the next positions already, as transformers calls them
SPAN = ["start_positions", "end_positions"]  # the targets of extractive question answering


def as_mapping(batch: Any) -> Mapping[str, Any] | None:
    """Return a batch of named values as a mapping; `None` if its values have no names."""
    kind = type(batch)
    if kind in _UNNAMED:  # the most frequent case
        return None
    if kind is dict or isinstance(batch, Mapping):
        return batch
    if is_dataclass_value(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch._asdict() if hasattr(batch, "_fields") else None


def split(batch: Any, label_names: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Return the inputs of the model in a batch, and the targets that its outputs are compared to.

    Raises:
        ConfigurationError: If the batch has no target.
    """
    named = None if type(batch) in _UNNAMED else as_mapping(batch)
    if named is not None:
        names = label_names_in(named, label_names)
        if not names:
            candidates = label_names or LABEL_NAMES
            raise ConfigurationError(
                f"The batch has {', '.join(map(str, named))} and no target: none of {', '.join(candidates)}. Name it: "
                f"TrainingArguments(label_names=[…]).{did_you_mean(candidates[0], named) if label_names else ''}"
            )
        return {name: value for name, value in named.items() if name not in names}, _targets_in(named, names)
    if isinstance(batch, (tuple, list)) and type(batch) is not PackedSequence and len(batch) > 1:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise ConfigurationError(
        f"loss_fn needs targets, and the batch is a single {type(batch).__name__}. Return (inputs, targets) from the "
        "dataset, or override compute_loss(model, batch)."
    )


def targets_of(batch: Any, label_names: Sequence[str] | None = None) -> Any:
    """Return the targets of a batch; `None` if it has no recognizable targets."""
    named = None if type(batch) in _UNNAMED else as_mapping(batch)
    if named is None:
        if type(batch) is PackedSequence:
            return None
        return batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    names = label_names_in(named, label_names)
    return _targets_in(named, names) if names else None


def label_names_in(named: Mapping[str, Any], label_names: Sequence[str] | None) -> list[str]:
    """Return the names of the targets in a batch."""
    if label_names:
        return [name for name in label_names if name in named]
    for name in LABEL_NAMES:
        if name in named:
            return [name]
    return list(SPAN) if all(name in named for name in SPAN) else []


def with_targets(batch: Any, targets: Any, label_names: Sequence[str] | None = None) -> Any:
    """Return a copy of a batch with its single target replaced.

    Raises:
        ConfigurationError: If it has several targets or no target.
    """
    named = as_mapping(batch)
    if named is None:
        split(batch)  # raises if there is no target
        return type(batch)([*batch[:-1], targets])
    names = label_names_in(named, label_names)
    if len(names) != 1:
        raise ConfigurationError(f"The batch must have exactly one target (got {', '.join(names) or 'no target'}).")
    return replaced(batch, {names[0]: targets})


def replaced(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a batch of named values with some of them replaced."""
    if hasattr(batch, "_replace"):
        return batch._replace(**values)
    if is_dataclass_value(batch):
        return dataclasses.replace(batch, **values)
    return {**batch, **values}


def _targets_in(named: Mapping[str, Any], names: Sequence[str]) -> Any:
    return named[names[0]] if len(names) == 1 else {name: named[name] for name in names}


def are_valid(labels: Tensor, ignored: int = IGNORE_INDEX) -> Tensor:
    """Return which labels are not ignored.

    Example:
        >>> are_valid(torch.tensor([156, 1], dtype=torch.uint8)).tolist()
        [True, True]
    """
    # Bytes are not negative: torch would compare them with 156 instead of -100.
    return (labels.long() if labels.dtype is torch.uint8 else labels) != ignored
