"""Collectives on tensors and on trees of tensors: gather, reduce, broadcast, pad."""

import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.collectives.shape_check import Leaf, check_dense, check_layouts, layout, verify, whole, without_sizes
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException, unknown
from trainer_lib.foundation.tensors.pytree import leaves, map_tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.partial_state import PartialState

_REDUCTIONS = ("mean", "sum", "max", "min", "none")

TENSOR_TYPE_TO_INT = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


class CannotPadNestedTensorWarning(UserWarning):
    """`pad_across_processes` got a nested tensor, which it does not pad."""


def gather(tensor: Any) -> Any:
    """Return the tensors of all ranks, concatenated along the first dimension in order of rank.

    Tensors without dimensions become one tensor with an element per rank. No gradient flows back.

    Args:
        tensor: A tensor, or tuples, lists, mappings and dataclasses of tensors, of one shape on all ranks.

    Example:
        >>> gather({"loss": torch.tensor(0.5)})
        {'loss': tensor([0.5000])}
    """
    group = _group("gather", tensor)
    return map_tensors(lambda leaf: torch.cat(group.all_gather(torch.atleast_1d(leaf.detach()))), tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean, maximum or minimum of the tensors of all ranks; the input does not change.

    Whole numbers and booleans are summed as 64-bit integers and have a fractional mean; 16-bit floats are summed in 32
    bits and rounded once. NaN on a rank is NaN in the result.

    Args:
        tensor: A tensor, or a tree of tensors, of one shape on all ranks.
        reduction: "mean", "sum", "max", "min", or "none" for a copy of this rank's tensor.
        scale: The factor of the result; "none" has none.

    Example:
        >>> reduce(torch.tensor([True, False]), "sum")
        tensor([1, 0])
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(unknown("reduction", reduction, _REDUCTIONS))
    group = _group("reduce", tensor)
    return map_tensors(lambda leaf: _reduced(leaf.detach(), group, reduction, scale), tensor)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite the tensor (or tree of tensors) with that of one rank, and return it.

    Example:
        >>> broadcast(torch.tensor([3]))
        tensor([3])
    """
    group = _group("broadcast", tensor)
    return map_tensors(lambda leaf: group.broadcast(leaf, from_process), tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return the tensor (or tree of tensors) padded to the largest size along `dim` that any rank has.

    Args:
        tensor: The tensors to pad; those without dimension `dim` are returned unchanged.
        dim: The dimension that differs.
        pad_index: The value to pad with.
        pad_first: Pad at the start instead of the end.

    Example:
        >>> pad_across_processes(torch.tensor([[7, 8]]), dim=1)
        tensor([[7, 8]])
    """
    group = _group("pad_across_processes", tensor, without_sizes, allows_nested=True)
    layouts = group.all_gather_objects(layout(tensor))
    check_layouts("pad_across_processes", layouts, without_sizes)
    largest = iter([max(_size(leaf, dim) for leaf in by_rank) for by_rank in zip(*layouts, strict=True)])
    return map_tensors(lambda leaf: _padded(leaf, dim, next(largest), pad_index, pad_first), tensor)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return the tensor (or tree of tensors) padded with zeros so that `num_processes` get equal parts of it.

    Args:
        tensor: The tensors to pad; those without dimension `dim` are returned unchanged.
        batch_size: The size of `dim`.
        num_processes: How many equal parts to make possible.
        dim: The dimension to pad.

    Example:
        >>> pad_input_tensors(torch.tensor([1, 2, 3]), batch_size=3, num_processes=2)
        tensor([1, 2, 3, 0])
    """
    target = -(-batch_size // num_processes) * num_processes
    return map_tensors(lambda leaf: _padded(leaf, dim, target), tensor)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return, on every rank's device, the tensor of the first rank that has one; other ranks pass `None`.

    Example:
        >>> copy_tensor_to_devices(torch.tensor([1.5]))
        tensor([1.5000])
    """
    state = PartialState()
    source, shape, dtype = _first_offer("copy_tensor_to_devices", tensor)
    if state.group.rank == source and tensor is not None:
        copied = tensor.detach().to(state.device, copy=True)
    else:
        copied = torch.empty(shape, dtype=dtype, device=state.device)
    return state.group.broadcast(copied, source)


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """Return the shape (as a column) and the number of the type of the first rank's tensor; others pass `None`.

    The numbers are those of `TENSOR_TYPE_TO_INT` in `trainer_lib.utils.operations`.
    """
    _, shape, dtype = _first_offer("gather_tensor_shape", tensor)
    return torch.tensor(shape, dtype=torch.int, device=PartialState().device).unsqueeze(1), TENSOR_TYPE_TO_INT[dtype]


def _first_offer(operation: str, tensor: Tensor | None) -> tuple[int, torch.Size, torch.dtype]:
    offers = PartialState().group.all_gather_objects(None if tensor is None else (tensor.shape, tensor.dtype))
    source = next((rank for rank, offer in enumerate(offers) if offer is not None), None)
    if source is None:
        raise DistributedOperationException(f"{operation} got no tensor on any rank. Pass a tensor on one rank.")
    return source, *offers[source]


def _group(
    operation: str, tree: Any, compared: Callable[[Leaf], Hashable] = whole, allows_nested: bool = False
) -> ProcessGroup:
    verify(operation, tree, compared)
    check_dense(operation, tree, allows_nested)
    for leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            inside = "" if leaf is tree else f" inside a {type(tree).__name__}"
            raise TypeError(
                f"{operation} got a {type(leaf).__name__}{inside}. Pass tensors, or tuples, lists, mappings and "
                "dataclasses of tensors; gather_object and broadcast_object_list accept anything."
            )
    return PartialState().group


def _reduced(tensor: Tensor, group: ProcessGroup, reduction: str, scale: float) -> Tensor:
    if reduction == "none":
        return tensor.clone()
    values = tensor.to(_summed_as(tensor.dtype), copy=True)
    is_nan = values.isnan() if reduction in ("max", "min") and values.is_floating_point() else None
    total = group.all_reduce(values, "sum" if reduction == "mean" else reduction)
    if is_nan is not None:  # the maxima of gloo and NCCL may lose it
        total = total.masked_fill(group.all_reduce(is_nan.to(torch.uint8), "max").bool(), math.nan)
    if reduction == "mean":
        total = total / group.size
    if scale != 1:
        total = total * scale
    return total.to(tensor.dtype) if tensor.is_floating_point() else total


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    return torch.int64


def _size(leaf: Leaf, dim: int) -> int:
    has_dim = leaf.shape is not None and -len(leaf.shape) <= dim < len(leaf.shape)
    return leaf.shape[dim] if has_dim and leaf.shape is not None else 0


def _padded(tensor: Tensor, dim: int, target: int, pad_index: float = 0, pad_first: bool = False) -> Tensor:
    if tensor.is_nested:
        warnings.warn(
            "pad_across_processes does not pad a nested tensor. Convert it to a plain tensor first: "
            "torch.nested.to_padded_tensor.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] >= target:
        return tensor
    size = tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = target
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, target - size if pad_first else 0, size).copy_(tensor)
    return padded
