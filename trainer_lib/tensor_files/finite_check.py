"""Finding tensors with NaN or Inf without a temporary copy of them."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trainer_lib.tensor_files.tensor_storage import stored_values

Fault = Literal["nan", "inf"]

_PIECE = 1 << 17  # numbers that are checked at a time, so that they stay in the cache
# For each dtype: the integer dtype of the same size, the mask without the sign bit, and the bits of infinity.
_BITS = {
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def nonfinite_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Fault]:
    """Return the tensors that are not finite, by name: "nan", or "inf" if they have infinities but no NaN.

    Example:
        >>> bad = torch.tensor([1.0, float("nan")])
        >>> nonfinite_tensors({"weight": torch.ones(2), "bias": bad, "mask": 1 / torch.zeros(2)})
        {'bias': 'nan', 'mask': 'inf'}
    """
    return {name: fault for name, tensor in tensors.items() if (fault := _fault(tensor)) is not None}


def _fault(tensor: Tensor) -> Fault | None:
    values = stored_values(tensor.detach()).resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.dtype not in _BITS or not values.numel():
        return None
    if values.device.type != "cpu":
        if bool(values.isfinite().all()):
            return None
        return "nan" if bool(values.isnan().any()) else "inf"
    kind, magnitude, infinity = _BITS[values.dtype]
    # NumPy, because torch's operations would use the threads of training.
    bits = values.reshape(-1).view(kind).numpy()
    memory = np.empty(min(_PIECE, len(bits)), bits.dtype)
    largest = 0
    for at in range(0, len(bits), _PIECE):
        piece = bits[at : at + _PIECE]
        largest = max(largest, int(np.bitwise_and(piece, magnitude, out=memory[: len(piece)]).max()))
    return None if largest < infinity else "inf" if largest == infinity else "nan"
