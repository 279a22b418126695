"""Collating samples that are plain tensors and integers, without torch's search for what each of them is made of."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from trainer_lib.data_loader.readers.worker_tensors import is_shared


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
            if in_worker and is_shared(len(samples) * value.nbytes):
                return None
        elif type(value) is not int:
            return None
    if default_collate_fn_map[Tensor] is not collate_tensor_fn:
        return None
    try:
        if kind is dict:
            if {*map(len, samples)} != {len(first)}:
                return None
            columns: Any = [tuple(map(itemgetter(name), samples)) for name in first]
        else:
            columns = zip(*samples, strict=True) if kind is tuple else (samples,)
        stacked = [torch.stack(column) if type(column[0]) is Tensor else torch.tensor(column) for column in columns]
    except (TypeError, ValueError, RuntimeError, KeyError):  # torch's own function tells what is wrong
        return None
    return dict(zip(first, stacked, strict=True)) if kind is dict else stacked if kind is tuple else stacked[0]


def _collate(samples: Any) -> Any:
    batch = stack_samples(samples)
    return default_collate(samples) if batch is None else batch
