"""Datasets from any kind of data: datasets of torch and Hugging Face, arrays, tensors and lists."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer_lib.data_loader.readers.row_batches import rows_of_array, rows_of_tensor
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of

Collate = Callable[[Sequence[Any], tuple[Any, ...]], Any]

_KNOWN = (
    "a dataset (map-style with __len__, or a torch.utils.data.IterableDataset), a tuple or dict of tensors or arrays, "
    "a list of samples, or a ready DataLoader"
)


def as_dataset(data: Any, option: str) -> Any:
    """Return data as a dataset that a `DataLoader` can read.

    Args:
        data: The data.
        option: The name of the data in errors.

    Raises:
        ConfigurationError: If the data has an unknown form or is empty.

    Example:
        >>> dataset = as_dataset((torch.arange(6).view(3, 2), torch.tensor([0, 1, 0])), "train_dataset")
        >>> len(dataset), dataset[1]
        (3, (tensor([2, 3]), tensor(1)))
    """
    dataset = data if isinstance(data, IterableDataset) else _from_arrays(data, option)
    if dataset is None:
        dataset = data
        if (reason := _rejection_reason(data)) is not None:
            raise ConfigurationError(f"{option} {reason}. Give {_KNOWN}.")
    if length_of(dataset) == 0:
        raise ConfigurationError(f"{option} is empty: this {type(data).__name__} has no samples.")
    return dataset


class Columns(Dataset[Any]):
    """Rows of arrays of equal length.

    Args:
        columns: Tensors, arrays or lists: by name, in a tuple, or a single one; samples have the same structure.
        option: The name of the data in errors.
    """

    def __init__(self, columns: Any, option: str = "The data") -> None:
        named = columns if isinstance(columns, Mapping) else dict(enumerate(_as_tuple(columns)))
        self._columns = {name: _column(name, value, option) for name, value in named.items()}
        self._shape = tuple if isinstance(columns, tuple) else dict if isinstance(columns, Mapping) else None
        self._reads_batches = False
        rows = {name: len(value) for name, value in self._columns.items()}
        if len(set(rows.values())) > 1:
            lengths = ", ".join(f"{name!r}: {count}" for name, count in rows.items())
            raise ConfigurationError(
                f"{option} must have arrays of the same length, since a sample is a row of all of them (got {lengths})."
            )

    def with_batched_reads(self) -> "Columns":
        """Return a copy from which `collate` reads a batch in one operation."""
        clone = copy.copy(self)
        clone._reads_batches = True
        return clone

    @property
    def columns(self) -> dict[Any, Any]:
        """The columns by name or number."""
        return self._columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> Any:
        return self._structured({name: _row(column, index) for name, column in self._columns.items()})

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        """Return several samples."""
        return RowSelection(self, indices) if self._reads_batches else [self[index] for index in indices]

    def batch(self, indices: list[int], collate: Collate) -> Any:
        """Return the batch of these samples, read column by column instead of sample by sample."""
        rows = np.array(indices)
        batch: dict[Any, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, Tensor):
                batch[name] = rows_of_tensor(column, rows)
            elif isinstance(column, np.ndarray):
                batch[name] = rows_of_array(column, rows)
            else:
                batch[name] = collate([column[index] for index in indices], (name,))
        structured = self._structured(batch)
        return list(structured) if self._shape is tuple else structured  # a list, as from torch's default_collate

    def _structured(self, values: dict[Any, Any]) -> Any:
        if self._shape is None:
            return values[0]
        return tuple(values.values()) if self._shape is tuple else values


class RowSelection(Sequence[Any]):
    """Rows of columns that are read only when a batch is made of them.

    Args:
        source: The columns.
        indices: The rows.
    """

    def __init__(self, source: Columns, indices: list[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._source[self._indices[index]]

    def batch(self, collate: Collate) -> Any:
        """Return the rows as a batch; `collate` handles columns that are not arrays."""
        return self._source.batch(self._indices, collate)


def _from_arrays(data: Any, option: str) -> Columns | None:
    """Return arrays as a dataset of rows; `None` for data that is not made of arrays."""
    if _is_of_pandas(data) and hasattr(data, "columns"):
        return Columns({str(name): data[name].to_numpy() for name in data.columns}, option)
    if isinstance(data, tuple):  # inputs and targets
        data = tuple(map(_as_array, data))
    elif isinstance(data, dict):
        data = {name: _as_array(column) for name, column in data.items()}
    if type(data) is TensorDataset:
        return Columns(data.tensors, option)
    return Columns(data, option) if _is_of_columns(data) else None


def _is_of_columns(data: Any) -> bool:
    if isinstance(data, tuple):
        return bool(data) and all(_is_array(column) or type(column) is list for column in data)
    if isinstance(data, Mapping) and len(data):  # a TensorDict has no truth
        return all(_is_array(column) or isinstance(column, (list, tuple)) for column in data.values())
    return _is_array(data)


def _rejection_reason(data: Any) -> str | None:
    if isinstance(data, (str, bytes)) or hasattr(data, "__fspath__"):
        return f"is {str(data)!r}, a name or path and not the data itself"
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:5]))
        return f"is a {type(data).__name__} of {names}, none of which is an array; of several sets, give one"
    if isinstance(data, tuple) and any(map(_is_array, data)):
        return f"is a tuple of {' and '.join(type(column).__name__ for column in data)}, and not all of them are arrays"
    if isinstance(data, (list, tuple)) and data and all(isinstance(part, (DataLoader, Dataset)) for part in data):
        return (
            f"is a {type(data).__name__} of {type(data[0]).__name__}s. Give several sets to evaluate on by name, "
            "{'a': …, 'b': …}; to train on several datasets, a MixedDataset, or one whose samples have a part of each"
        )
    if hasattr(data, "__next__"):
        return f"is a {type(data).__name__}, which can be read only once"
    if hasattr(data, "train_dataloader"):
        return (
            f"is the data module {type(data).__name__}, and not its data: call its prepare_data() and setup('fit'), "
            "and give its loaders, train_dataset=data.train_dataloader() and eval_dataset=data.val_dataloader()"
        )
    if inspect.isgeneratorfunction(data):
        return (
            f"is the generator function {data.__name__!r}: give list({data.__name__}()) if the samples fit into "
            "memory, else an IterableDataset whose __iter__ yields them"
        )
    if inspect.isroutine(data):
        return f"is the function {getattr(data, '__name__', data)!r}, and not its result: call it"
    if isinstance(data, type) or not hasattr(data, "__getitem__"):
        return f"is {'the class ' if isinstance(data, type) else 'a '}{getattr(data, '__name__', type(data).__name__)}"
    return f"is a {type(data).__name__}, which has no length" if length_of(data) is None else None


def _is_of_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def _as_array(column: Any) -> Any:
    return column.to_numpy() if _is_of_pandas(column) else column


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _as_tuple(columns: Any) -> tuple[Any, ...]:
    return columns if isinstance(columns, tuple) else (columns,)


def _column(name: Any, column: Any, option: str) -> Any:
    if isinstance(column, np.ndarray) and not _fits_torch(column.dtype):
        return column.tolist()  # texts and other values that torch has no dtype for
    if not isinstance(column, (Tensor, np.ndarray, list, tuple)):
        raise ConfigurationError(
            f"{option}: column {name!r} must be a tensor, an array or a list (got {type(column).__name__})."
        )
    return column


def _fits_torch(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _row(column: Any, index: int) -> Any:
    # Copies the row: a memory-mapped file may be read-only.
    return torch.from_numpy(np.array(column[index])) if isinstance(column, np.ndarray) else column[index]
