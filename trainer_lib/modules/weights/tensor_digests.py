"""Digests of tensors: numbers by which their bits are compared, without a copy of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_lib.foundation.tensors.tensor_operations import plain

_CHUNK = 1 << 20  # values that are weighted at once
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for the bits of each tensor and their order, with one wait for the device.

    Example:
        >>> one, same, other = digests([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
        >>> one == same, one == other
        (True, False)
    """
    if not tensors:
        return []
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in map(plain, tensors)]
    return torch.stack([_digest(tensor.detach()).to(tensors[0].device) for tensor in real]).tolist()


def _digest(tensor: Tensor) -> Tensor:
    flat, size = tensor.view(-1), tensor.element_size()
    is_aligned = not (flat.numel() * size % 8 or flat.storage_offset() * size % 8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in flat.view(torch.int64 if is_aligned else _INTEGERS[size]).split(_CHUNK):
        words = part.long()
        places = torch.arange(1, len(words) + 1, device=flat.device)
        total = total * 31 + ((words ^ (words >> 29)) * places).sum()  # the shift, as round values end in zeros
    return total
