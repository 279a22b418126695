"""This file is what data may come as: torch's and Hugging Face's datasets as they are, arrays as datasets of rows."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer_lib.foundation.errors import ConfigurationError

Collate = Callable[[Sequence[Any], tuple[Any, ...]], Any]

_KNOWN = (
    "a dataset (map-style with __len__, or a torch.utils.data.IterableDataset), a tuple or dict of tensors or arrays, "
    "a list of samples, or a ready DataLoader"
)


def as_dataset(data: Any, option: str) -> Any:
    """Return data as a dataset that a `DataLoader` reads.

    Args:
        data: The data.
        option: What it was given for.

    Raises:
        ConfigurationError: If it cannot be read as data, or is empty.

    Example:
        >>> dataset = as_dataset((torch.arange(6).view(3, 2), torch.tensor([0, 1, 0])), "train_dataset")
        >>> len(dataset), dataset[1]
        (3, (tensor([2, 3]), tensor(1)))
    """
    dataset = data if isinstance(data, IterableDataset) else _of_arrays(data, option)
    if dataset is None:
        dataset = data
        if (reason := _why_not(data)) is not None:
            raise ConfigurationError(f"{option} {reason}. Give {_KNOWN}.")
    if length_of(dataset) == 0:
        raise ConfigurationError(f"{option} is empty: there is no sample in this {type(data).__name__}.")
    return dataset


def length_of(dataset: Any) -> int | None:
    """Return how many samples a dataset has, if it knows."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class Columns(Dataset[Any]):
    """Rows of arrays of equal length.

    Args:
        columns: Tensors, arrays or lists: by name, in a tuple, or one alone; a sample is made as they are.
        option: What they were given for.
    """

    def __init__(self, columns: Any, option: str = "The data") -> None:
        named = columns if isinstance(columns, Mapping) else dict(enumerate(_as_tuple(columns)))
        self._columns = {name: _column(name, value, option) for name, value in named.items()}
        self._shape = tuple if isinstance(columns, tuple) else dict if isinstance(columns, Mapping) else None
        self._gathers = False
        rows = {name: len(value) for name, value in self._columns.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"{name!r}: {count}" for name, count in rows.items())
            raise ConfigurationError(
                f"{option} has arrays of different lengths ({told}); a sample is a row of all of them."
            )

    def gathering(self) -> "Columns":
        """Return the same, of which batches are taken as a whole, for `collate`."""
        other = copy.copy(self)
        other._gathers = True
        return other

    @property
    def columns(self) -> dict[Any, Any]:
        """The columns by name, or by number."""
        return self._columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> Any:
        return self._arranged({name: _row(column, index) for name, column in self._columns.items()})

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        """Return several samples."""
        return Gathered(self, indices) if self._gathers else [self[index] for index in indices]

    def batch(self, indices: list[int], collate: Collate) -> Any:
        """Return the batch that collating these samples would give, without taking them apart first."""
        rows = np.array(indices)
        places = torch.from_numpy(rows)  # from a list it takes ten times as long
        batch: dict[Any, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, Tensor):
                batch[name] = column.index_select(0, places.to(column.device))
            elif isinstance(column, np.ndarray):
                batch[name] = torch.from_numpy(column[rows])
            else:
                batch[name] = collate([column[index] for index in indices], (name,))
        arranged = self._arranged(batch)
        return list(arranged) if self._shape is tuple else arranged  # as torch's default_collate has it

    def _arranged(self, values: dict[Any, Any]) -> Any:
        if self._shape is None:
            return values[0]
        return tuple(values.values()) if self._shape is tuple else values


class Gathered(Sequence[Any]):
    """Samples of columns that are not taken apart yet.

    Args:
        source: The columns.
        indices: Which rows.
    """

    def __init__(self, source: Columns, indices: list[int]) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._source[self._indices[index]]

    def batch(self, collate: Collate) -> Any:
        """Return them as a batch, with `collate` for what is no array."""
        return self._source.batch(self._indices, collate)


def _of_arrays(data: Any, option: str) -> Columns | None:
    """Return arrays as rows; `None` for what is a dataset, or nothing known."""
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        return Columns({str(name): data[name].to_numpy() for name in data.columns}, option)
    if type(data) is TensorDataset:
        return Columns(data.tensors, option)
    if _is_array(data) or (
        isinstance(data, tuple) and data and all(_is_array(one) or type(one) is list for one in data)
    ):
        return Columns(data, option)
    if (
        isinstance(data, Mapping)
        and data
        and all(_is_array(one) or isinstance(one, (list, tuple)) for one in data.values())
    ):
        return Columns(data, option)
    return None


def _why_not(data: Any) -> str | None:
    if isinstance(data, (str, bytes)) or hasattr(data, "__fspath__"):
        return f"is {str(data)!r}, the name of something, and not the data"
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:5]))
        return f"is a {type(data).__name__} of {names}, none of which is an array; if they are several sets, give one"
    if isinstance(data, tuple) and any(map(_is_array, data)):
        return f"is a tuple of {' and '.join(type(one).__name__ for one in data)}, and not all of them are arrays"
    if hasattr(data, "__next__"):
        return f"is a {type(data).__name__}, which is used up after one pass"
    if inspect.isgeneratorfunction(data):
        return (
            f"is the function {data.__name__!r}, whose samples come once a call: give list({data.__name__}()) if they "
            "fit into memory, else return them from __iter__ of an IterableDataset"
        )
    if inspect.isroutine(data):
        return f"is the function {getattr(data, '__name__', data)!r}, and not what it returns: call it"
    if isinstance(data, type) or not hasattr(data, "__getitem__"):
        return f"is {'the class ' if isinstance(data, type) else 'a '}{getattr(data, '__name__', type(data).__name__)}"
    return f"is a {type(data).__name__}, which has no length" if length_of(data) is None else None


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _as_tuple(columns: Any) -> tuple[Any, ...]:
    return columns if isinstance(columns, tuple) else (columns,)


def _column(name: Any, column: Any, option: str) -> Any:
    if isinstance(column, np.ndarray) and not _fits_torch(column.dtype):
        return column.tolist()  # texts and the like
    if not isinstance(column, (Tensor, np.ndarray, list, tuple)):
        raise ConfigurationError(f"{option}: column {name!r} is a {type(column).__name__}, and no array.")
    return column


def _fits_torch(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _row(column: Any, index: int) -> Any:
    # A copy of the row: what is read from a file that is mapped into memory may not be written to.
    return torch.from_numpy(np.array(column[index])) if isinstance(column, np.ndarray) else column[index]
