"""A hook that stores a module's weights in one type and computes in another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.hooks.model_hook import ModelHook


class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in one type and computes in another, for inference and frozen layers.

    Args:
        storage_dtype: The type between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The type of a forward and of its floating inputs.
        non_blocking: Do not wait for copies.
    """

    non_blocking: bool

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype: torch.dtype
        self.compute_dtype: torch.dtype
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the storage type."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Convert the weights to the type of the computation."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back to the storage type."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
