"""This file is how a batch goes into a model, and what comes out of it."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any, Unpack, get_args, get_origin

import torch
from torch import Tensor, nn

from trainer_lib.foundation.batch_fields import (
    IGNORE_INDEX,
    LABEL_NAMES,
    SPAN,
    as_mapping,
    label_names_in,
    split,
    targets_of,
)
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.trainer.data.batch_rows import count_rows
from trainer_lib.trainer.losses.loss_result import Weight, count_valid

__all__ = [
    "LABEL_NAMES",
    "as_mapping",
    "batch_size",
    "call_model",
    "check_names",
    "check_values",
    "count_items",
    "count_tokens",
    "is_scalar",
    "label_names_in",
    "loss_of",
    "predictions_of",
    "split",
    "targets_of",
]


def call_model(model: Any, inputs: Any, **more: Any) -> Any:
    """Call a model with a batch: a mapping or a dataclass by names, a tuple or a list in order, a tensor alone."""
    if type(inputs) is Tensor:  # first: by far the most frequent
        return model(inputs, **more)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return model(*inputs, **more)
    named = as_mapping(inputs)
    return model(inputs, **more) if named is None else model(**named, **more)


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
    if isinstance(labels, dict) and list(labels) == SPAN:
        return _count_spans(labels, batch)
    return float(batch_size(batch))


def count_tokens(batch: Any) -> int | Tensor:
    """Return how many tokens a batch has in `input_ids`, without what `attention_mask` marks as padding.

    On an accelerator it is a tensor, so that nothing waits for it.

    Raises:
        ConfigurationError: If it has none.

    Example:
        >>> count_tokens({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
        4
    """
    named = as_mapping(batch) or {}
    tokens, mask = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(tokens, Tensor):
        raise ConfigurationError(
            "max_tokens and intervals in tokens count input_ids, and the batch has none. It has: "
            f"{', '.join(map(repr, named)) or 'no names'}. Give limits and intervals in steps, epochs or samples."
        )
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        return tokens.numel()
    found = mask.count_nonzero()
    return int(found) if found.is_cpu else found


def _count_spans(spans: dict[str, Any], batch: Any) -> Weight:
    """Count the answers inside their text: models ignore positions behind its end."""
    tokens = (as_mapping(batch) or {}).get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return float(batch_size(batch))
    inside = [count_valid(torch.where(spans[name] < tokens.shape[1], 0, IGNORE_INDEX)) for name in SPAN]
    return (inside[0] + inside[1]) / 2


def batch_size(batch: Any) -> int:
    """Return the samples of a batch: the rows of its first tensor or list."""
    return count_rows(batch) or 1


def check_names(model: nn.Module, batch: Any) -> None:
    """Check that a model takes all that a batch names, and that the batch has all that the model needs.

    A `**kwargs` that says which names it means (`Unpack[…]`, as in transformers) takes these only.

    Args:
        model: The user's model.
        batch: A batch.

    Raises:
        ConfigurationError: If it does not.
    """
    named = as_mapping(batch)
    if named is None:
        return
    given = list(named)
    known, takes_any = _taken(model)
    foreign = [] if takes_any else [name for name in given if name not in known]
    forward = f"{type(model).__name__}.forward"
    if foreign:
        raise ConfigurationError(
            f"The batch has {', '.join(map(repr, foreign))}, which {forward} does not take. It takes: "
            f"{', '.join(known)}.{did_you_mean(foreign[0], known)} Leave what is not meant for the model out of the "
            "dataset (remove_columns), give TrainingArguments(remove_unused_columns=True), or override "
            "compute_loss(model, batch)."
        )
    missing = [name for name, one in known.items() if one is not None and one.default is one.empty]
    missing = [name for name in missing if name not in given]
    if missing:
        raise ConfigurationError(
            f"{forward} needs {', '.join(map(repr, missing))}, and the batch has "
            f"{', '.join(map(repr, given)) or 'none'}.{did_you_mean(missing[0], given)} Put it into the dataset, or "
            "override compute_loss(model, batch)."
        )


def check_values(model: nn.Module, inputs: Any) -> None:
    """Check that a model takes as many values as a batch without names has.

    Raises:
        ConfigurationError: If it does not.
    """
    if as_mapping(inputs) is not None:
        return
    values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    try:
        inspect.signature(model.forward).bind(*values)
    except TypeError as error:
        known, _ = _taken(model)
        raise ConfigurationError(
            f"The batch has {len(values)} value{'s' * (len(values) != 1)} for {type(model).__name__}.forward, which "
            f"takes {', '.join(known) or 'none'}: {error}. With Trainer(loss_fn=…) the last value of a batch is the "
            "target, else all of them go into the model. Have the dataset give what it takes, or override "
            "compute_loss(model, batch)."
        ) from None


def _taken(model: nn.Module) -> tuple[dict[str, inspect.Parameter | None], bool]:
    """Return the names that a model takes (with the parameter, if it is one), and whether it takes any other."""
    known: dict[str, inspect.Parameter | None] = {}
    takes_any = False
    for name, one in inspect.signature(model.forward).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            further, takes_any = _taken_besides(model, one.annotation)
            known |= dict.fromkeys(further)
        elif one.kind is not one.VAR_POSITIONAL:
            known[name] = one
    return known, takes_any


def _taken_besides(model: Any, annotation: Any) -> tuple[list[str], bool]:
    """Return the names that a model takes as `**kwargs`, and whether it takes any other."""
    if hasattr(model, "get_base_model"):  # PEFT's, which hands on what it does not know
        further, takes_any = _taken(model.get_base_model())
        return list(further), takes_any
    declared = _unpacked(model, annotation)
    if declared is None and any(one.__name__ == "PreTrainedModel" for one in type(model).__mro__):
        # Most models of transformers say what they take there, and all leave lying what they do not know.
        declared = getattr(sys.modules.get("transformers.utils"), "TransformersKwargs", None)
    return list(getattr(declared, "__annotations__", ())), declared is None


def _unpacked(model: nn.Module, annotation: Any) -> Any:
    """Return what a model's `**kwargs: Unpack[…]` names; `None` if it names nothing."""
    if isinstance(annotation, str) and annotation.startswith("Unpack["):
        scope = vars(sys.modules.get(type(model).__module__, sys))
        return scope.get(annotation.removeprefix("Unpack[").removesuffix("]"))
    return get_args(annotation)[0] if get_origin(annotation) is Unpack else None


def predictions_of(outputs: Any) -> Any:
    """Return what of a model's outputs is its prediction: the logits if they are called that, without the loss."""
    if outputs is None or is_scalar(outputs):
        return None
    named = as_mapping(outputs)
    if named is not None:
        if "logits" in named:
            return named["logits"]
        rest = {name: v for name, v in named.items() if name not in ("loss", "past_key_values") and v is not None}
        return next(iter(rest.values())) if len(rest) == 1 else rest
    if isinstance(outputs, (tuple, list)):
        rest = tuple(value for value in outputs if value is not None and not is_scalar(value))
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
