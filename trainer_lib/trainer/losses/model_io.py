"""Calling a model with a batch, and reading loss and predictions from its outputs."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.tensors.batch_fields import (
    IGNORE_INDEX,
    LABEL_NAMES,
    SHIFTED_LABELS,
    SPAN,
    as_mapping,
    label_names_in,
    split,
    targets_of,
)
from trainer_lib.modules.forwards import forward_signature
from trainer_lib.trainer.data.batch_rows import count_rows
from trainer_lib.trainer.losses.loss_result import Weight, count_valid, on_host

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
    """Call a model with a batch: mappings and dataclasses by name, tuples and lists by position, a tensor alone.

    Args:
        model: The model.
        inputs: The batch.
        **more: Options; those in the batch take precedence.
    """
    if type(inputs) is Tensor:  # first, as the most frequent case
        return model(inputs, **more)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return model(*inputs, **more)
    named = as_mapping(inputs)
    return model(inputs, **more) if named is None else model(**{**more, **named})


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the rows of its first tensor or list."""
    return count_rows(batch) or 1


def count_items(
    batch: Any,
    label_names: Sequence[str] | None = None,
    shifted: bool = False,
    samples: Callable[[Any], int] = batch_size,
    ignored: int = IGNORE_INDEX,
) -> Weight:
    """Return the number of items that the loss of a batch averages over, as far as the batch shows it.

    Args:
        batch: The batch.
        label_names: The names that are targets.
        shifted: Whether each token is compared with the next label, so that the first label of a row is no target.
        samples: Counts the samples of a batch without labels to count.
        ignored: The label that is no target.
    """
    labels = targets_of(batch, label_names)
    if hasattr(batch, "keys") and SHIFTED_LABELS in batch:  # which the model compares instead
        labels, shifted = batch[SHIFTED_LABELS], False
    if isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex() and labels.ndim:
        if shifted and labels.ndim > 1:
            labels = (labels if labels.is_cpu else on_host(labels))[..., 1:]
        return count_valid(labels, ignored)
    if isinstance(labels, dict) and list(labels) == SPAN:
        return _count_spans(labels, batch)
    return float(samples(batch))


def count_tokens(batch: Any) -> int | Tensor:
    """Return the number of tokens in `input_ids`, without the padding that `attention_mask` marks.

    Where only an accelerator knows the mask, the number is a tensor, so that the CPU does not wait for it.

    Raises:
        ConfigurationError: If the batch has no `input_ids`.

    Example:
        >>> count_tokens({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
        4
    """
    named = as_mapping(batch) or {}
    tokens, mask = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(tokens, Tensor):
        raise ConfigurationError(
            "max_tokens and intervals in tokens count input_ids, and the batch has none. Its fields: "
            f"{', '.join(map(repr, named)) or 'none'}. Give limits and intervals in steps, epochs or samples."
        )
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        return tokens.numel()
    tokens_in_mask = on_host(mask).count_nonzero()
    return int(tokens_in_mask) if tokens_in_mask.is_cpu else tokens_in_mask


def _count_spans(spans: dict[str, Any], batch: Any) -> Weight:
    """Return the number of answers inside their text: models ignore positions after its end."""
    tokens = (as_mapping(batch) or {}).get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return float(batch_size(batch))
    ends = [on_host(spans[name]) < tokens.shape[1] for name in SPAN]
    inside = [count_valid(torch.where(is_inside, 0, IGNORE_INDEX)) for is_inside in ends]
    return (inside[0] + inside[1]) / 2


def check_names(model: nn.Module, batch: Any) -> None:
    """Check that a model takes all fields of a batch, and that the batch has all fields that the model needs.

    A `**kwargs` annotated with its names (`Unpack[…]`, as in transformers) takes only these.

    Args:
        model: The user's model.
        batch: A batch.

    Raises:
        ConfigurationError: If a field is unknown or missing.
    """
    named = as_mapping(batch)
    if named is None:
        return
    fields = list(named)
    known, takes_any = _parameters_taken(model)
    extra = [] if takes_any else [name for name in fields if name not in known]
    missing = [
        name
        for name, parameter in known.items()
        if parameter is not None and parameter.default is parameter.empty and name not in fields
    ]
    forward = f"{type(model).__name__}.forward"
    if extra and missing:
        raise ConfigurationError(
            f"The batch has {', '.join(map(repr, extra))}, which {forward} does not take. It takes: "
            f"{', '.join(known)}, and {', '.join(map(repr, missing))} {'are' if len(missing) > 1 else 'is'} missing."
            f"{did_you_mean(extra[0], known)} Rename the fields in the dataset (rename_column), or override "
            "compute_loss(model, batch)."
        )
    if extra:
        meant = did_you_mean(extra[0], known)
        advice = f"{meant} Rename the column (rename_column). If not, remove" if meant else " Remove"
        raise ConfigurationError(
            f"The batch has {', '.join(map(repr, extra))}, which {forward} does not take. It takes: "
            f"{', '.join(known)}.{advice} these columns from the dataset "
            "(remove_columns), give TrainingArguments(remove_unused_columns=True), or override "
            "compute_loss(model, batch)."
        )
    if missing:
        raise ConfigurationError(
            f"{forward} needs {', '.join(map(repr, missing))}, and the batch has "
            f"{', '.join(map(repr, fields)) or 'no fields'}.{did_you_mean(missing[0], fields)} Add it to the dataset, "
            "or override compute_loss(model, batch)."
        )


def check_values(model: nn.Module, inputs: Any, has_loss_fn: bool) -> None:
    """Check that a model takes as many values as a batch without names has.

    Args:
        model: The user's model.
        inputs: What the model is called with.
        has_loss_fn: Whether there is a `loss_fn`, which got the last value of the batch.

    Raises:
        ConfigurationError: If the numbers differ.
    """
    if as_mapping(inputs) is not None:
        return
    values = inputs if isinstance(inputs, (tuple, list)) and type(inputs) is not PackedSequence else (inputs,)
    if (problem := _cannot_bind(model, values)) is None:
        return
    known, _ = _parameters_taken(model)
    counts = (
        f"The batch has {len(values)} value{'s' * (len(values) != 1)} for {type(model).__name__}.forward, which "
        f"takes {', '.join(known) or 'none'}"
    )
    if not has_loss_fn and len(values) > 1 and _cannot_bind(model, values[:-1]) is None:
        raise ConfigurationError(
            f"{counts}, and there is no loss_fn. If the last value is the target, give "
            "Trainer(loss_fn=torch.nn.functional.cross_entropy), or the loss of your task; or override "
            "compute_loss(model, batch)."
        )
    raise ConfigurationError(
        f"{counts}: {problem}. With Trainer(loss_fn=…) the last value of a batch is the target; without it all values "
        "go to the model. Return matching values from the dataset, or override compute_loss(model, batch)."
    )


def _cannot_bind(model: nn.Module, values: Sequence[Any]) -> str | None:
    """Return why a model's forward does not take these values by position; `None` if it does."""
    try:
        forward_signature(model).bind(*values)
    except TypeError as error:
        return str(error)
    return None


def _parameters_taken(model: nn.Module) -> tuple[dict[str, inspect.Parameter | None], bool]:
    """Return the names that a model's forward takes (None for names in `**kwargs`), and whether it takes any name."""
    known: dict[str, inspect.Parameter | None] = {}
    takes_any = False
    for name, parameter in forward_signature(model).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            further, takes_any = _keywords_taken(model, parameter.annotation)
            known |= dict.fromkeys(further)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            known[name] = parameter
    return known, takes_any


def _keywords_taken(model: Any, annotation: Any) -> tuple[list[str], bool]:
    """Return the names that a model takes as `**kwargs`, and whether it takes any name."""
    if hasattr(model, "get_base_model"):  # an adapter of PEFT, which passes keywords to its base model
        further, takes_any = _parameters_taken(model.get_base_model())
        return list(further), takes_any
    from trainer_lib.modules.module_kinds import is_transformers_model

    declared, inherited = _unpacked(model, annotation), list[str]()
    if is_transformers_model(model):
        # Most models of transformers list the keywords they take there, and ignore all others.
        declared = declared or getattr(sys.modules.get("transformers.utils"), "TransformersKwargs", None)
        inherited = _inherited_names(model)
    of_loss = [SHIFTED_LABELS] if hasattr(model, "loss_function") else []  # the loss of transformers takes it besides
    return [*getattr(declared, "__annotations__", ()), *inherited, *of_loss], declared is None


def _inherited_names(model: nn.Module) -> list[str]:
    """Return the names that the forwards of a model's base classes take, to which its own may pass its keywords."""
    bases = [kind for kind in type(model).__mro__[1:] if kind is not nn.Module]
    forwards = [vars(kind)["forward"] for kind in bases if "forward" in vars(kind)]
    taken = [parameter for forward in forwards for parameter in inspect.signature(forward).parameters.values()]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in taken if parameter.kind in by_name and parameter.name != "self"]


def _unpacked(model: nn.Module, annotation: Any) -> Any:
    """Return the class in a model's `**kwargs: Unpack[…]`; `None` without one."""
    if isinstance(annotation, str) and annotation.startswith("Unpack["):
        scope = vars(sys.modules.get(type(model).__module__, sys))
        return scope.get(annotation.removeprefix("Unpack[").removesuffix("]"))
    return get_args(annotation)[0] if get_origin(annotation) is Unpack else None


_BESIDE_LOGITS = frozenset({"pred_boxes", "pred_masks", "mc_logits", "entity_logits", "logits_aggregation"})


def predictions_of(outputs: Any) -> Any:
    """Return the predictions in a model's outputs: `logits` if there are any, else all but the loss and the cache.

    Logits are a dict with what models of transformers predict besides: boxes and masks, or the logits of a second task.
    """
    if outputs is None or is_scalar(outputs):
        return None
    named = as_mapping(outputs)
    if named is not None:
        if "logits" in named:
            if _BESIDE_LOGITS.isdisjoint(named):
                return named["logits"]
            return {name: named[name] for name in named if name == "logits" or name in _BESIDE_LOGITS}
        rest = {
            name: value
            for name, value in named.items()
            if name not in ("loss", "past_key_values") and value is not None and not _is_cache(value)
        }
        return next(iter(rest.values())) if len(rest) == 1 else rest
    if isinstance(outputs, (tuple, list)):
        rest = tuple(value for value in outputs if value is not None and not is_scalar(value))
        return rest[0] if len(rest) == 1 else rest
    return outputs


def _is_cache(value: Any) -> bool:
    """Whether a value is a decoder's cache of keys and values, whose name depends on the version of transformers."""
    module: Any = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


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
    """Whether a value is a floating-point scalar tensor."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
