"""Batches read in one operation for each column."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, get_worker_info

from trainer_lib.data_loader.readers.worker_tensors import worker_memory

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
    out = worker_memory((len(rows), *column.shape[1:]), column.dtype) if is_plain else None
    return torch.index_select(column, 0, torch.from_numpy(rows).to(column.device), out=out)


def rows_of_array(column: np.ndarray[Any, Any], rows: Rows) -> Tensor:
    """Return rows of an array as a tensor."""
    is_block = column.flags.c_contiguous and column.flags.aligned
    if not is_block:  # `take` would copy all of it
        return torch.from_numpy(column[rows])
    if get_worker_info() is None or not 0 <= rows.min() <= rows.max() < len(column):
        return torch.from_numpy(column.take(rows, 0))  # faster than indices, and than torch
    dtype = torch.from_numpy(column[:0].copy()).dtype  # a copy, since torch warns of arrays that cannot be written to
    out = worker_memory((len(rows), *column.shape[1:]), dtype)
    if out is None:
        return torch.from_numpy(column.take(rows, 0))
    column.take(rows, 0, out=out.numpy(), mode="clip")  # the default mode, "raise", would write into a buffer first
    return out


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided and not tensor.requires_grad
