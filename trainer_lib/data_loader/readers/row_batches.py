"""Batches made in one operation for each column: read from tensors, or stacked of samples."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

Rows = np.ndarray[Any, np.dtype[np.int64]]
_IN_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


class ReadBatch(list[Any]):
    """The columns of a batch that needs no collating."""


def has_columns(dataset: Any) -> bool:
    """Whether a dataset is a `TensorDataset`, or a part of one."""
    return type(dataset.dataset if type(dataset) is Subset else dataset) is TensorDataset


def read_batch(dataset: Any, keys: Sequence[Any]) -> ReadBatch | None:
    """Return what `default_collate` makes of samples of a `TensorDataset`, or of a part of one.

    Returns `None` for other datasets, and for keys or tensors that have to be read one by one.

    Example:
        >>> read_batch(Subset(TensorDataset(torch.arange(4.0)), [3, 1, 0]), [0, 2])
        [tensor([3., 0.])]
    """
    if type(dataset) is not TensorDataset:
        if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
            return read_batch(dataset.dataset, [dataset.indices[key] for key in keys])
        return None
    rows = np.array(keys)
    if rows.dtype.kind != "i" or rows.ndim != 1:
        return None
    is_worker, columns = get_worker_info() is not None, ReadBatch()
    try:
        for tensor in dataset.tensors:
            if type(tensor) is not Tensor or tensor.requires_grad or tensor.layout != torch.strided:
                return None
            # Here and not in a function: a call for each tensor of each batch is what a step would notice.
            if not is_worker and tensor.is_cpu and tensor.dtype in _IN_NUMPY and tensor.is_contiguous():
                columns.append(torch.from_numpy(tensor.numpy().take(rows, 0)))
            else:
                columns.append(rows_of_tensor(tensor, rows))
    except (IndexError, RuntimeError):  # reading one by one tells which sample it is
        return None
    return columns


def rows_of_tensor(column: Tensor, rows: Rows) -> Tensor:
    """Return rows of a tensor."""
    is_plain = _is_plain(column)
    if is_plain and column.dtype in _IN_NUMPY:
        return rows_of_array(column.numpy(), rows)
    out = _worker_memory((len(rows), *column.shape[1:]), column.dtype) if is_plain else None
    return torch.index_select(column, 0, torch.from_numpy(rows).to(column.device), out=out)


def rows_of_array(column: np.ndarray[Any, Any], rows: Rows) -> Tensor:
    """Return rows of an array as a tensor."""
    is_block = column.flags.c_contiguous and column.flags.aligned
    if not is_block:  # `take` would copy all of it
        return torch.from_numpy(column[rows])
    if get_worker_info() is None or not 0 <= rows.min() <= rows.max() < len(column):
        return torch.from_numpy(column.take(rows, 0))  # faster than indices, and than torch
    dtype = torch.from_numpy(column[:0].copy()).dtype  # a copy, since torch warns of arrays that cannot be written to
    out = _worker_memory((len(rows), *column.shape[1:]), dtype)
    if out is None:
        return torch.from_numpy(column.take(rows, 0))
    column.take(rows, 0, out=out.numpy(), mode="clip")  # the default mode, "raise", would write into a buffer first
    return out


def faster_collate(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that makes the same batches as `collate`, faster where `collate` is torch's own."""
    return _collate if collate is default_collate else collate


def stack_samples(samples: Sequence[Any]) -> Any:
    """Return what `default_collate` makes of samples that are tensors, or tuples or dicts of tensors and integers.

    Returns `None` for other samples, for those that do not fit together, and in a worker for large ones, which are
    stacked into memory that it shares.

    Example:
        >>> stack_samples([(torch.zeros(2), 5), (torch.ones(2), 6)])
        [tensor([[0., 0.],
                [1., 1.]]), tensor([5, 6])]
    """
    first, in_worker = samples[0], get_worker_info() is not None
    kind = type(first)
    for value in first if kind is tuple else first.values() if kind is dict else (first,):
        if type(value) is Tensor:
            if value.layout is not torch.strided or value.is_nested:
                return None
            if in_worker and _is_shared(len(samples) * value.nbytes):
                return None
        elif type(value) is not int:
            return None
    if default_collate_fn_map[Tensor] is not collate_tensor_fn:
        return None
    if kind is dict and ({*map(type, samples)} != {dict} or {*map(tuple, samples)} != {tuple(first)}):
        return None
    stacked: list[Tensor] = []
    try:
        rows = map(dict.values, samples) if kind is dict else samples
        columns: Any = zip(*rows, strict=True) if kind is dict or kind is tuple else (samples,)
        for column in columns:  # a comprehension is a call
            stacked.append(torch.stack(column) if type(column[0]) is Tensor else torch.tensor(column))  # noqa: PERF401
    except (TypeError, ValueError, RuntimeError):  # torch's own function tells what is wrong
        return None
    return dict(zip(first, stacked, strict=True)) if kind is dict else stacked if kind is tuple else stacked[0]


def _collate(samples: Any) -> Any:
    batch = stack_samples(samples)
    return default_collate(samples) if batch is None else batch


def _is_shared(size: int) -> bool:
    from trainer_lib.data_loader.readers.worker_tensors import is_shared  # which only workers need

    return is_shared(size)


def _worker_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return memory that a worker passes on without another copy; `None` for small tensors, and outside of workers."""
    if get_worker_info() is None:
        return None
    from trainer_lib.data_loader.readers.worker_tensors import shared_memory

    return shared_memory(shape, dtype)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided and not tensor.requires_grad
