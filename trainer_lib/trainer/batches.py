"""This file is how a batch goes into a model, and what of it is the target."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.trees import is_dataclass_value
from trainer_lib.trainer.losses import Weight, count_valid
from trainer_lib.trainer.rows import count_rows

LABEL_NAMES = ("labels", "label", "targets", "target", "y")


def call_model(model: Any, inputs: Any, **more: Any) -> Any:
    """Call a model with a batch: a mapping or a dataclass by names, a tuple or a list in order, a tensor alone."""
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return model(*inputs, **more)
    named = as_mapping(inputs)
    return model(inputs, **more) if named is None else model(**named, **more)


def as_mapping(batch: Any) -> Mapping[str, Any] | None:
    """Return a batch of named values as a mapping; `None` if its values have no names."""
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
            raise ConfigurationError(
                f"The batch has {', '.join(map(str, named))} and no target: none of {', '.join(LABEL_NAMES)}. Name it: "
                "TrainingArguments(label_names=[…])."
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
    return [name for name in LABEL_NAMES if name in named][:1]


def count_items(batch: Any, label_names: Sequence[str] | None = None, shifted: bool = False) -> Weight:
    """Return how many items the loss of a batch is a mean over, as far as one can tell from the batch.

    Args:
        batch: The batch.
        label_names: Which names are targets.
        shifted: Each token is compared with the next, so the first of a row is no target.
    """
    labels = targets_of(batch, label_names)
    if isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex() and labels.ndim:
        return count_valid(labels[..., 1:] if shifted and labels.ndim > 1 else labels)
    return float(batch_size(batch))


def batch_size(batch: Any) -> int:
    """Return the samples of a batch: the rows of its first tensor or list."""
    return count_rows(batch) or 1


def check_names(model: nn.Module, batch: Any, dropped: Sequence[str] = ()) -> None:
    """Check that a model takes all that a batch names.

    Args:
        model: The user's model.
        batch: A batch.
        dropped: The names that do not go into it.

    Raises:
        ConfigurationError: If it does not.
    """
    named = as_mapping(batch)
    if named is None:
        return
    given = [name for name in named if name not in dropped]
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    foreign = [name for name in given if name not in parameters]
    if foreign:
        known = list(parameters)
        raise ConfigurationError(
            f"The batch has {', '.join(map(repr, foreign))}, which {type(model).__name__}.forward does not take. It "
            f"takes: {', '.join(known)}.{did_you_mean(foreign[0], known)} Leave what is not meant for the model out of "
            "the dataset (remove_columns), or override compute_loss(model, batch); nothing is dropped silently."
        )


def predictions_of(outputs: Any) -> Any:
    """Return what of a model's outputs is its prediction: the logits if they are called that, without the loss."""
    named = as_mapping(outputs)
    if named is not None:
        if "logits" in named:
            return named["logits"]
        rest = {name: v for name, v in named.items() if name not in ("loss", "past_key_values") and v is not None}
        return next(iter(rest.values())) if len(rest) == 1 else rest
    if isinstance(outputs, (tuple, list)):
        rest = tuple(value for value in outputs if not is_scalar(value))
        return rest[0] if len(rest) == 1 else rest
    return outputs


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, if there is one."""
    if is_scalar(outputs):
        return outputs
    named = as_mapping(outputs)
    if named is not None:
        return named.get("loss")
    if isinstance(outputs, (tuple, list)):
        scalars = [value for value in outputs if is_scalar(value)]
        return scalars[0] if len(scalars) == 1 else None
    return None


def is_scalar(value: Any) -> bool:
    """Whether a value is one floating number in a tensor."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
