"""Norms and clipping of gradients that are replicated on all ranks, sharded over them, or both."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.foundation.device_types import FOREACH_NORM, sum_dtype
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.tensors.tensor_operations import foreach_mul_, foreach_norm


def local_values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the values of each tensor on this rank: its shard, the values of a sparse tensor, or the tensor."""
    return [tensor if type(tensor) is Tensor and not tensor.is_sparse else _local_value(tensor) for tensor in tensors]


def _local_value(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else getattr(tensor, "_local_tensor", tensor)


def weight_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which ranks exchange loss weights: double on the CPU, where that costs nothing.

    So the exchange does not round the updates of a model in double precision.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


@torch.no_grad()
def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Clip the gradients to a total norm of at most `max_norm`, and return the norm before clipping."""
    gradients = _gradients(parameters)
    total = total_norm(gradients, norm_type, device)
    multiply(gradients, _coefficient(max_norm, total))
    return total


def shrink(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of the known total norm `norm` to at most `max_norm`, as torch's `clip_grad_norm_` does."""
    multiply(_gradients(parameters), _coefficient(max_norm, norm))


@torch.no_grad()
def clip_whole(parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients that are whole, bit for bit as torch's `clip_grad_norm_` does.

    Torch's function groups gradients by device and type first. That takes longer than the clipping itself, so gradients
    of one device and type skip it.
    """
    parameters = list(parameters)
    gradients = _gradients(parameters)
    total = _norm_of_uniform(gradients, norm_type)
    if total is None:
        if any(gradient.is_sparse for gradient in gradients):
            return clip_norm(parameters, max_norm, norm_type, gradients[0].device)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    foreach_mul_(gradients, _coefficient(max_norm, total))
    return total


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place, without waiting for the device."""
    values = local_values(gradients)
    if not isinstance(factor, Tensor) or (factor.is_cpu and not [value for value in values if not value.is_cpu]):
        if values:
            foreach_mul_(values, factor)
        return
    by_device: dict[torch.device, list[Tensor]] = {}  # offloaded shards are on the CPU, whole gradients are not
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    for device, group in by_device.items():
        foreach_mul_(group, factor.to(device))


@torch.no_grad()
def clamp_gradients(parameters: Iterable[Tensor], largest: float) -> None:
    """Clamp each gradient to ±`largest`."""
    for values in local_values(_gradients(parameters)):
        values.clamp_(-largest, largest)


@torch.no_grad()
def total_grad_norm(
    parameters: Iterable[Tensor], norm_type: float, device: torch.device, in_double: bool = False
) -> Tensor:
    """Return the norm over all gradients, the same on all ranks.

    Args:
        parameters: The parameters with the gradients.
        norm_type: The order of the norm.
        device: The device of the result.
        in_double: Compute in double precision, in which the squares of large values do not overflow.
    """
    return total_norm(_gradients(parameters), norm_type, device, in_double)


@torch.no_grad()
def norm_over_ranks(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Return the norm over all gradients from that of this rank's, where each rank has other ones."""
    return _reduced_norms(norm.double().reshape(1), float(norm_type), group)[0].to(norm.dtype)


def norm_of_whole(parameters: Iterable[Tensor], norm_type: float, in_double: bool = False) -> Tensor:
    """Return the norm over gradients that are whole, bit for bit as torch's `get_total_norm` does."""
    gradients = _gradients(parameters)
    total = None if in_double else _norm_of_uniform(gradients, norm_type)
    if total is not None:  # not under no_grad, which takes longer than to detach
        return total.detach() if total.requires_grad else total
    with torch.no_grad():
        if in_double or any(gradient.is_sparse for gradient in gradients):
            return total_norm(gradients, norm_type, gradients[0].device, in_double)
        return torch.nn.utils.get_total_norm(gradients, norm_type)


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device, in_double: bool = False) -> Tensor:
    """Return the norm over all tensors as a plain tensor, equal on all ranks that hold parts of them."""
    norm_type = float(norm_type)
    powers: dict[tuple[Any, ...], Tensor] = {}  # by the groups over which they have to be reduced
    for layout, group in _by_layout(gradients).items():
        norms = _norms(local_values(group), norm_type, device, sum_dtype(device) if in_double else None)
        _add(powers, () if layout is None else _groups_of_shards(*layout), _powers(norms, norm_type))
    if not powers:
        return torch.zeros((), device=device)
    is_double = any(gradient.dtype is torch.float64 for gradient in gradients)
    return _over_ranks(powers, norm_type).to(torch.float64 if is_double else torch.float32)


class NormOfParts:
    """The norm over gradients of which each is gone before the next one is there.

    Args:
        device: The device of the result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._norms: dict[Any, list[Tensor]] = {}  # by mesh and placements

    @torch.no_grad()
    def add(self, gradient: Tensor) -> Tensor:
        """Count a gradient, and return the norm of its values on this rank."""
        if gradient.is_sparse:
            gradient = gradient.coalesce()
        values = local_values([gradient])
        norm = _norms(values, 2.0, gradient.device, None)[0]
        if norm.is_cpu and not math.isfinite(norm.item()):
            norm = _norms(values, 2.0, gradient.device, torch.float64)[0]  # squares of large values do not overflow
        ((layout, _),) = _by_layout([gradient]).items()
        self._norms.setdefault(layout, []).append(norm)
        return norm

    @torch.no_grad()
    def total(self) -> Tensor:
        """Return the norm over all of them, equal on all ranks that hold parts of them."""
        powers: dict[tuple[Any, ...], Tensor] = {}
        for layout, norms in self._norms.items():
            groups = () if layout is None else _groups_of_shards(*layout)
            on_device = torch.stack([norm.to(self._device, non_blocking=True) for norm in norms])
            _add(powers, groups, _powers(on_device, 2.0))
        return _over_ranks(powers, 2.0).float() if powers else torch.zeros((), device=self._device)

    def clear(self) -> None:
        """Forget the gradients."""
        self._norms.clear()


def _coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """Return `min(max_norm / (norm + 1e-6), 1)`, bit for bit as `clip_grad_norm_` computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            if gradient.is_sparse and not gradient.is_coalesced():  # sums the values of each row
                gradient = parameter.grad = gradient.coalesce()
            gradients.append(gradient)
    return gradients


def _norm_of_uniform(gradients: list[Tensor], norm_type: float) -> Tensor | None:
    """Return the norm of plain tensors if all have one device and type, else `None`."""
    kinds = {(type(gradient), gradient.device, gradient.dtype, gradient.is_sparse) for gradient in gradients}
    kind, device, _, is_sparse = next(iter(kinds)) if len(kinds) == 1 else (None, None, None, True)
    if kind is not Tensor or device is None or is_sparse or device.type not in FOREACH_NORM:
        return None
    norm_type = float(norm_type)  # torch takes "inf" too
    return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, norm_type)), norm_type)


def _by_layout(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by their mesh and placements; whole tensors get the key `None`."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        spec: Any = getattr(tensor, "_spec", None)
        groups.setdefault(None if spec is None else (spec.mesh, spec.placements), []).append(tensor)
    return groups


def _norms(tensors: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    norms = list(foreach_norm(filled, norm_type, dtype=dtype)) if filled else []
    if len(filled) < len(tensors):
        like = norms[0] if norms else torch.empty((), device=device)
        norm_of_empty = torch.full_like(like, math.inf if norm_type == -math.inf else 0.0)
        remaining = iter(norms)
        norms = [next(remaining) if tensor.numel() else norm_of_empty for tensor in tensors]
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, sum_dtype(device), non_blocking=True) for norm in norms]
    # In double, so that the powers that ranks add up neither underflow nor overflow.
    return torch.stack(norms).to(device, sum_dtype(device), non_blocking=True)


def _groups_of_shards(mesh: Any, placements: Sequence[Any]) -> tuple[Any, ...]:
    """Return the groups of ranks that hold other parts of a tensor."""
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedError(
                f"Gradient norms support the placements Shard and Replicate (got {placement}). Shard with FSDP2."
            )
    return tuple(mesh.get_group(d) for d, placement in enumerate(placements) if not placement.is_replicate())


def _over_ranks(powers: dict[tuple[Any, ...], Tensor], norm_type: float) -> Tensor:
    """Return the total norm of powers by the groups over which they have to be reduced."""
    while groups := max(powers, key=len):  # one message a group, however many layouts there are
        reduced = _summed(powers.pop(groups), norm_type)
        _all_reduce(reduced, norm_type, groups[-1])
        _add(powers, groups[:-1], reduced)
    return _root(powers[()], norm_type)


def _add(powers: dict[tuple[Any, ...], Tensor], groups: tuple[Any, ...], values: Tensor) -> None:
    powers[groups] = torch.cat([powers[groups], values]) if groups in powers else values


def _reduced_norms(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    powers = _powers(norms, norm_type)
    _all_reduce(powers, norm_type, group)
    return powers if _counts(norm_type) else powers.pow(1 / norm_type)


def _powers(norms: Tensor, norm_type: float) -> Tensor:
    """Return what is added up to the power of a total norm."""
    return norms if _counts(norm_type) else norms.pow(norm_type)


def _counts(norm_type: float) -> bool:
    """Whether norms are compared or counted, not added up."""
    return math.isinf(norm_type) or norm_type == 0


def _summed(powers: Tensor, norm_type: float) -> Tensor:
    """Return one power for all tensors; the norm 0 counts tensors, so each of them stays by itself."""
    if norm_type == 0:
        return powers
    if math.isinf(norm_type):
        return (powers.amax() if norm_type > 0 else powers.amin()).reshape(1)
    return powers.sum().reshape(1)


def _all_reduce(powers: Tensor, norm_type: float, group: Any) -> None:
    if not math.isinf(norm_type):
        dist.all_reduce(powers, group=group)
        return
    # Not reduced by the backend, whose maximum may lose a NaN.
    by_rank = powers.new_empty(dist.get_world_size(group), *powers.shape)
    dist.all_gather(list(by_rank), powers, group=group)
    powers.copy_(by_rank.amax(0) if norm_type > 0 else by_rank.amin(0))


def _root(powers: Tensor, norm_type: float) -> Tensor:
    """Return the total norm of powers on this rank."""
    if norm_type == 0:
        return powers.count_nonzero()
    total = _summed(powers, norm_type)[0]
    return total if math.isinf(norm_type) else total.pow(1 / norm_type)
