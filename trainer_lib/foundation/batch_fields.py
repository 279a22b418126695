"""This file is the values of a batch by their names, and which of them are targets."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.pytree import is_dataclass_value

_NAMELESS = frozenset({Tensor, list, tuple})
LABEL_NAMES = ("labels", "label", "targets", "target", "y")
IGNORE_INDEX = -100  # the label that losses and metrics skip, as in torch and transformers
SPAN = ["start_positions", "end_positions"]  # what models that answer questions find


def as_mapping(batch: Any) -> Mapping[str, Any] | None:
    """Return a batch of named values as a mapping; `None` if its values have no names."""
    if type(batch) in _NAMELESS:  # first: by far the most frequent
        return None
    if isinstance(batch, Mapping):
        return batch
    if is_dataclass_value(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch._asdict() if hasattr(batch, "_fields") else None


def split(batch: Any, label_names: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Return what of a batch goes into the model, and what the outputs are compared to.

    Raises:
        ConfigurationError: If nothing in it is a target.
    """
    named = as_mapping(batch)
    if named is not None:
        names = label_names_in(named, label_names)
        if not names:
            looked_for = label_names or LABEL_NAMES
            raise ConfigurationError(
                f"The batch has {', '.join(map(str, named))} and no target: none of {', '.join(looked_for)}. Name it: "
                f"TrainingArguments(label_names=[…]).{did_you_mean(looked_for[0], named) if label_names else ''}"
            )
        inputs = {name: value for name, value in named.items() if name not in names}
        return inputs, named[names[0]] if len(names) == 1 else {name: named[name] for name in names}
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise ConfigurationError(
        f"loss_fn compares outputs with targets, and the batch is one {type(batch).__name__}. Have the dataset give "
        "(inputs, targets), or override compute_loss(model, batch)."
    )


def targets_of(batch: Any, label_names: Sequence[str] | None = None) -> Any:
    """Return the targets of a batch, or `None` if it has none that one could know."""
    named = as_mapping(batch)
    if named is not None and not label_names_in(named, label_names):
        return None
    if named is None and not (isinstance(batch, (tuple, list)) and len(batch) > 1):
        return None
    return split(batch, label_names)[1]


def label_names_in(named: Mapping[str, Any], label_names: Sequence[str] | None) -> list[str]:
    """Return which names of a batch are targets."""
    if label_names:
        return [name for name in label_names if name in named]
    first = [name for name in LABEL_NAMES if name in named][:1]
    return first or (list(SPAN) if all(name in named for name in SPAN) else [])


def with_targets(batch: Any, targets: Any, label_names: Sequence[str] | None = None) -> Any:
    """Return a batch with other targets in the place of its own, a single tensor; the batch itself stays as it is.

    Raises:
        ConfigurationError: If it has several targets, or none.
    """
    named = as_mapping(batch)
    if named is None:
        split(batch)  # or raise
        return type(batch)([*batch[:-1], targets])
    names = label_names_in(named, label_names)
    if len(names) != 1:
        raise ConfigurationError(f"One target is needed, and the batch has {', '.join(names) or 'none'}.")
    return replaced(batch, {names[0]: targets})


def replaced(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a batch of named values with some of them replaced; the batch itself stays as it is."""
    if hasattr(batch, "_replace"):
        return batch._replace(**values)
    if is_dataclass_value(batch):
        return dataclasses.replace(batch, **values)
    return {**batch, **values}
