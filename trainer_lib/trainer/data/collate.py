"""Collating samples into batches, and padding tokenized samples."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer_lib.data_loader.readers.row_batches import stack_samples
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.tensors.pytree import is_dataclass_value
from trainer_lib.trainer.data.datasets import RowSelection

_LABELS = ("labels", "label", "label_ids")
_FIX = "Pass collate_fn, a function from a list of samples to a batch"
_TOKENS = ("input_ids", "attention_mask", "token_type_ids")

Path = tuple[str | int, ...]


def collate(samples: Sequence[Any]) -> Any:
    """Return a batch of samples.

    Works like torch's `default_collate`, with these differences: a list of numbers becomes a row of a tensor, as in
    Hugging Face's datasets; Python floats take torch's default dtype; lists of texts stay lists; dataclasses stay
    dataclasses.

    Args:
        samples: The samples.

    Raises:
        ConfigurationError: If the samples do not fit together; it names the field.

    Example:
        >>> collate([{"input_ids": [1, 2], "text": "a"}, {"input_ids": [3, 4], "text": "b"}])
        {'input_ids': tensor([[1, 2],
                [3, 4]]), 'text': ['a', 'b']}
    """
    if type(samples) is RowSelection:
        return samples.batch(_collate)
    batch = stack_samples(samples)
    return _collate(samples, ()) if batch is None else batch


class PaddingCollate:
    """Pads tokenized samples to the longest of a batch, as the tokenizer does; collates other samples like `collate`.

    Lists of labels of different lengths are padded with -100. All fields stay; "label" and "label_ids" are renamed to
    "labels", the name that models of transformers use.

    Args:
        processing_class: A tokenizer, or a processor that has one.
    """

    def __init__(self, processing_class: Any) -> None:
        self.tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples."""
        first = samples[0]
        pads = callable(getattr(self.tokenizer, "pad", None)) and hasattr(self.tokenizer, "model_input_names")
        is_tokenized = isinstance(first, Mapping) and "input_ids" in first and _has_rows(first["input_ids"])
        # Samples with position_ids are packed: an attention mask would hide from the model where each one begins.
        if not pads or not is_tokenized or "position_ids" in first:
            return collate(samples)
        _check_keys(samples, ())
        if getattr(self.tokenizer, "pad_token", None) is not None:
            return _rename_labels(self._pad(samples))
        if _is_ragged(samples, "input_ids"):
            raise ConfigurationError(
                f"The samples have different lengths, and {type(self.tokenizer).__name__} has no padding token. Set "
                "one: tokenizer.pad_token = tokenizer.eos_token. Or pass collate_fn."
            )
        return _rename_labels(collate(samples))

    def _pad(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from transformers import DataCollatorWithPadding

        names = list(samples[0])
        by_tokenizer = {*self.tokenizer.model_input_names, "special_tokens_mask"} & set(names)
        padded = DataCollatorWithPadding(self.tokenizer)(
            [{name: sample[name] for name in by_tokenizer} for sample in samples]
        )
        batch: dict[str, Any] = {}
        for name in names:
            if name in by_tokenizer:
                batch[name] = padded[name]
            elif name in _LABELS and _is_ragged(samples, name):
                batch[name] = self._pad_labels([sample[name] for sample in samples])
            else:
                batch[name] = _collate([sample[name] for sample in samples], (name,))
        batch |= {name: value for name, value in padded.items() if name not in batch}  # adds the attention mask
        return batch

    def _pad_labels(self, labels: list[Any]) -> Tensor:
        longest = max(map(len, labels))
        rows = [torch.as_tensor(values) for values in labels]
        # An empty list has torch's default dtype.
        dtype = next((row.dtype for row in rows if row.is_floating_point() and len(row)), torch.int64)
        batch = torch.full((len(labels), longest), IGNORE_INDEX, dtype=dtype)
        on_left = self.tokenizer.padding_side == "left"
        for row, values in zip(batch, rows, strict=True):
            columns = slice(longest - len(values), None) if on_left else slice(len(values))
            row[columns] = values
        return batch


class RenamedLabels:
    """Collates, then renames "label" and "label_ids" to "labels", the name that models of transformers use.

    Args:
        collate_fn: Collates the samples.
    """

    def __init__(self, collate_fn: Callable[..., Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples."""
        batch = self.collate_fn(samples)
        return _rename_labels(batch) if isinstance(batch, dict) else batch


def _rename_labels(batch: dict[str, Any]) -> dict[str, Any]:
    present = [name for name in _LABELS if name in batch]
    return {"labels" if [name] == present else name: value for name, value in batch.items()}


def _is_ragged(samples: Sequence[Any], name: str) -> bool:
    """Whether a field holds rows of different lengths."""
    return all(_has_rows(sample[name]) for sample in samples) and len({len(sample[name]) for sample in samples}) > 1


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or getattr(value, "ndim", 0) > 0


def _collate(values: Sequence[Any], path: Path) -> Any:
    first = values[0]
    if isinstance(first, (str, bytes)):
        return list(values)
    if isinstance(first, (Tensor, np.ndarray, np.generic)):
        return _leaf(default_collate, values, path)
    if isinstance(first, Number):
        return _leaf(torch.tensor, values, path)
    if isinstance(first, Mapping):
        return _mapping(values, path)
    if is_dataclass_value(first):
        return _dataclass(values, path)
    if isinstance(first, tuple):
        columns = _columns(values, path)
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    if isinstance(first, list):
        return _lists(values, path)
    raise ConfigurationError(
        f"{_field(path)} cannot be collated: {_kind(first)} is not a tensor, array, number or text. {_FIX}, or return "
        "a tensor from the dataset."
    )


def _leaf(make: Any, values: Sequence[Any], path: Path) -> Any:
    try:
        return make(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_alike(values, path, error) from error


def _mapping(values: Sequence[Mapping[Any, Any]], path: Path) -> Any:
    _check_keys(values, path)
    first = values[0]
    batch = {key: _collate([value[key] for value in values], (*path, key)) for key in first}
    if type(first) is dict or not isinstance(first, MutableMapping):
        return batch
    clone = copy.copy(first)  # keeps what a mapping holds beside its keys
    clone.update(batch)
    return clone


def _check_keys(values: Sequence[Mapping[Any, Any]], path: Path) -> None:
    keys = values[0].keys()
    for value in values:
        if not isinstance(value, Mapping) or value.keys() != keys:  # pyright: ignore[reportUnnecessaryIsInstance]
            other = set(value) if isinstance(value, Mapping) else set[Any]()  # pyright: ignore[reportUnnecessaryIsInstance]
            missing = sorted(map(str, set(keys) ^ other))
            raise ConfigurationError(
                f"{_field(path)} cannot be collated: not all samples have {', '.join(map(repr, missing))}. {_FIX}."
            )


def _dataclass(values: Sequence[Any], path: Path) -> Any:
    clone = copy.copy(values[0])
    for field in dataclasses.fields(values[0]):
        column = [getattr(value, field.name, None) for value in values]
        object.__setattr__(clone, field.name, _collate(column, (*path, field.name)))  # the dataclass may be frozen
    return clone


def _lists(values: Sequence[Any], path: Path) -> Any:
    leaf = _first_leaf(values)
    if leaf is None or isinstance(leaf, Number):
        return _leaf(torch.tensor, values, path)
    return list(values) if isinstance(leaf, (str, bytes)) else _columns(values, path)


def _first_leaf(values: Sequence[Any]) -> Any:
    """Return the first value in nested lists that is not a list."""
    for value in values:
        leaf = _first_leaf(value) if isinstance(value, list) else value
        if leaf is not None:
            return leaf
    return None


def _columns(values: Sequence[Any], path: Path) -> list[Any]:
    try:
        columns = list(zip(*values, strict=True))
    except (ValueError, TypeError) as error:
        raise _not_alike(values, path, error) from error
    return [_collate(column, (*path, index)) for index, column in enumerate(columns)]


def _not_alike(values: Sequence[Any], path: Path, error: Exception) -> ConfigurationError:
    pads = " A tokenizer given as processing_class pads token ids." if path and path[-1] in _TOKENS else ""
    return ConfigurationError(f"{_field(path)} cannot be collated: {_difference(values, error)}. {_FIX}.{pads}")


def _field(path: Path) -> str:
    return f"The samples' field {'.'.join(map(str, path))!r}" if path else "The samples"


def _difference(values: Sequence[Any], error: Exception) -> str:
    """Describe how values differ: in their types, shapes or lengths, or else with torch's message."""
    for description, properties in (
        ("the types differ", [_kind(value) for value in values]),
        ("the shapes differ", [tuple(getattr(value, "shape", ())) for value in values]),
        ("the lengths differ", [len(value) if isinstance(value, (list, tuple)) else 0 for value in values]),
    ):
        different = list(dict.fromkeys(properties))
        if len(different) > 1:
            return f"{description} ({' and '.join(map(str, different[:2]))})"
    return str(error)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
