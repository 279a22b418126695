"""torch's operations on lists of tensors, one kernel for many of them; torch has no public names for these."""

from collections.abc import Callable

import torch

foreach_copy_: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_  # pyright: ignore[reportPrivateUsage]
foreach_mul_: Callable[..., None] = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage]
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm  # pyright: ignore[reportPrivateUsage]
