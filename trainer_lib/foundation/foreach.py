"""torch's operations on lists of tensors, one kernel for many of them; torch has no public names for these."""

import torch

foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]
foreach_lerp_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateUsage]
foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateUsage]
