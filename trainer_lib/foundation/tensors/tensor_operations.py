"""Operations on tensors: torch's on lists of them, one kernel for many, and the values of a tensor as bytes."""

from collections.abc import Callable

import torch
from torch import Tensor

# Torch has no public names for these.
foreach_copy_: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_  # pyright: ignore[reportPrivateUsage]
foreach_mul_: Callable[..., None] = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage]
foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm  # pyright: ignore[reportPrivateUsage]


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if its values are not in memory as they are and in their order.

    Example:
        >>> plain(torch.ones(2, 3).T).is_contiguous()
        True
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a flat tensor of bytes; those of a contiguous one share its memory.

    Example:
        >>> as_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)[:1, 1])
        tensor([2, 0], dtype=torch.uint8)
    """
    values = plain(tensor).reshape(-1)
    if values.numel() < 2:
        # Contiguous whatever its stride is, but torch views only a stride of 1 as another type.
        values = values.as_strided(values.shape, (1,))
    return values.view(torch.uint8)


def has_same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors on one device have the same type, shape and bits.

    Example:
        >>> nan = torch.tensor([float("nan")])
        >>> has_same_bits(nan, nan.clone()), has_same_bits(nan, nan.double())
        (True, False)
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return not first.numel() or torch.equal(as_bytes(first.detach()), as_bytes(second.detach()))
