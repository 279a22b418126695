"""This file is norms and clipping of gradients that are whole on each process, sharded over them, or both."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor; operations on it alone need no word from the others."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Shrink the gradients to a norm of at most `max_norm` over all of them, and return the norm before."""
    gradients = _gradients(parameters)
    total = total_norm(gradients, norm_type, device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    multiply(gradients, factor)
    return total


@torch.no_grad()
def clip_whole(parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Do the same for gradients that are whole.

    With the operations of torch's `clip_grad_norm_`, to the last digit. That sorts them by device and type first, which
    takes longer than the operations and is of no use where all are alike.
    """
    parameters = list(parameters)
    gradients = _gradients(parameters)
    kinds = {(type(gradient), gradient.device, gradient.dtype) for gradient in gradients}
    kind, device, _ = next(iter(kinds)) if len(kinds) == 1 else (None, None, None)
    if kind is not Tensor or device is None or device.type not in ("cpu", "cuda"):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, norm_type)), norm_type)
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
def norm(parameters: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm over all gradients, the same on all processes."""
    return total_norm(_gradients(parameters), norm_type, device)


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm over all tensors as a plain tensor, equal on all processes that share them."""
    norm_type = float(norm_type)
    norms: list[Tensor] = []
    for layout, group in _by_layout(gradients).items():
        own = _norms(local_values(group), norm_type, device)
        norms.append(own if layout is None else _over_shards(own, norm_type, *layout))
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.cat(norms), norm_type).float()


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _by_layout(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by where their parts are: `None` for whole ones, else a mesh and the placements on it."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        spec: Any = getattr(tensor, "_spec", None)
        groups.setdefault(None if spec is None else (spec.mesh, spec.placements), []).append(tensor)
    return groups


def _norms(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    own = list(torch._foreach_norm(filled, norm_type)) if filled else []
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
