"""Digests of tensors: numbers by which their bits are compared, without a copy of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for the bits of each tensor, with one wait for the device.

    Example:
        >>> digests([torch.ones(3), torch.ones(3)])
        [3196059648, 3196059648]
    """
    if not tensors:
        return []
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    bits = [tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()]) for tensor in real]
    sums = [values.sum().to(tensors[0].device) for values in bits]
    return torch.stack(sums).tolist()
