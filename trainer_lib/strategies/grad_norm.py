"""This file is norms and clipping of gradients that are whole on each process, sharded over them, or both."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor: its shard, the values of a sparse one, or all of it."""
    return [tensor._values() if tensor.is_sparse else getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def weight_dtype(device: torch.device) -> torch.dtype:
    """Return in what the weights of losses travel between ranks: in double where that costs nothing.

    Weights of a model in double are not to round its updates.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Shrink the gradients to a norm of at most `max_norm` over all of them, and return the norm before."""
    gradients = _gradients(parameters)
    total = total_norm(gradients, norm_type, device)
    multiply(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def shrink(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Shrink gradients whose norm is known to a norm of at most `max_norm`, as torch's `clip_grad_norm_` does."""
    multiply(_gradients(parameters), torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def clip_whole(parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Do the same for gradients that are whole.

    With the operations of torch's `clip_grad_norm_`, to the last digit. That sorts them by device and type first, which
    takes longer than the operations and is of no use where all are alike.
    """
    parameters = list(parameters)
    gradients = _gradients(parameters)
    total = _norm_of_alike(gradients, norm_type)
    if total is None:
        if any(gradient.is_sparse for gradient in gradients):
            return clip_norm(parameters, max_norm, norm_type, gradients[0].device)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place, without waiting for the device that they and the factor are on."""
    values = local_values(gradients)
    if not isinstance(factor, Tensor):
        if values:
            torch._foreach_mul_(values, factor)
        return
    by_device: dict[torch.device, list[Tensor]] = {}  # shards may be in the host's memory, and whole ones are not
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Cut each gradient to at most `largest` in size."""
    for values in local_values(_gradients(parameters)):
        values.clamp_(-largest, largest)


@torch.no_grad()
def norm(parameters: Iterable[Tensor], norm_type: float, device: torch.device, in_double: bool = False) -> Tensor:
    """Return the norm over all gradients, the same on all ranks.

    Args:
        parameters: Whose gradients.
        norm_type: Which norm.
        device: Where to.
        in_double: Compute in double precision, in which the squares of large values do not overflow.
    """
    return total_norm(_gradients(parameters), norm_type, device, in_double)


@torch.no_grad()
def norm_of_whole(parameters: Iterable[Tensor], norm_type: float, in_double: bool = False) -> Tensor:
    """Do the same for gradients that are whole, with the operations of torch's `get_total_norm`."""
    gradients = _gradients(parameters)
    if in_double or any(gradient.is_sparse for gradient in gradients):
        return total_norm(gradients, norm_type, gradients[0].device, in_double)
    total = _norm_of_alike(gradients, norm_type)
    return torch.nn.utils.get_total_norm(gradients, norm_type) if total is None else total


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device, in_double: bool = False) -> Tensor:
    """Return the norm over all tensors as a plain tensor, equal on all ranks that share them."""
    norm_type = float(norm_type)
    norms: list[Tensor] = []
    for layout, group in _by_layout(gradients).items():
        own = _norms(local_values(group), norm_type, device, torch.float64 if in_double else None)
        norms.append(own if layout is None else _over_shards(own, norm_type, *layout))
    if not norms:
        return torch.zeros((), device=device)
    is_double = any(gradient.dtype is torch.float64 for gradient in gradients)
    return torch.linalg.vector_norm(torch.cat(norms), norm_type).to(torch.float64 if is_double else torch.float32)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            if gradient.is_sparse and not gradient.is_coalesced():  # several values of one row count as their sum
                gradient = parameter.grad = gradient.coalesce()
            gradients.append(gradient)
    return gradients


def _norm_of_alike(gradients: list[Tensor], norm_type: float) -> Tensor | None:
    """Return the norm of plain tensors of one device and type; `None` of any others."""
    kinds = {(type(one), one.device, one.dtype, one.is_sparse) for one in gradients}
    kind, device, _, is_sparse = next(iter(kinds)) if len(kinds) == 1 else (None, None, None, True)
    if kind is not Tensor or device is None or is_sparse or device.type not in ("cpu", "cuda"):
        return None
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, norm_type)), norm_type)


def _by_layout(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by where their parts are: `None` for whole ones, else a mesh and the placements on it."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        spec: Any = getattr(tensor, "_spec", None)
        groups.setdefault(None if spec is None else (spec.mesh, spec.placements), []).append(tensor)
    return groups


def _norms(tensors: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    own = list(torch._foreach_norm(filled, norm_type, dtype=dtype)) if filled else []
    if len(filled) < len(tensors):
        like = own[0] if own else torch.empty((), device=device)
        nothing = torch.full_like(like, math.inf if norm_type == -math.inf else 0.0)
        norms = iter(own)
        own = [next(norms) if tensor.numel() else nothing for tensor in tensors]
    if len({(one.device, one.dtype) for one in own}) > 1:
        own = [one.to(device, torch.float64, non_blocking=True) for one in own]
    # In double, so that the powers which processes add up neither vanish nor overflow.
    return torch.stack(own).to(device, torch.float64, non_blocking=True)


def _over_shards(norms: Tensor, norm_type: float, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """Return the norms of whole tensors, given those of this process's shards."""
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            norms = _joined(norms, norm_type, mesh.get_group(dimension))
        elif not placement.is_replicate():
            raise NotImplementedError(f"The norm of gradients placed as {placement} is not known.")
    return norms


def _joined(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    if math.isinf(norm_type):
        dist.all_reduce(norms, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group=group)
        return norms
    if norm_type == 0:  # the number of values that are not 0
        dist.all_reduce(norms, group=group)
        return norms
    powers = norms.pow(norm_type)
    dist.all_reduce(powers, group=group)
    return powers.pow(1 / norm_type)
