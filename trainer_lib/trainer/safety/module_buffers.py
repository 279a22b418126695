"""Buffers and gradients as they were before a forward and backward that do not count."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of models, and what they were when they were kept.

    Args:
        models: The models.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._owners = [(one._buffers, name) for one in modules.values() for name in one._buffers]
        self.exist = bool(self._owners)
        self._there: list[Tensor | None] = []
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember what they are."""
        # All of them: that one was written to cannot be told from its version, which BatchNorm leaves alone.
        before, self._there = self._there, [owner[name] for owner, name in self._owners]
        now = [one for one in self._there if one is not None]
        if len(before) == len(self._there) and all(
            one is other for one, other in zip(before, self._there, strict=True)
        ):
            if now:
                torch._foreach_copy_(self._kept, now)
        else:
            self._kept = [one.clone() for one in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Have the same buffers hold what they held."""
        for (owner, name), buffer in zip(self._owners, self._there, strict=True):
            owner[name] = buffer
        now = [one for one in self._there if one is not None]
        if now:
            torch._foreach_copy_(now, self._kept)

    @torch.no_grad()
    def put_back_where(self, flag: Tensor) -> None:
        """Do the same where a flag on the device is true, without waiting for it."""
        for buffer, kept in zip((one for one in self._there if one is not None), self._kept, strict=True):
            buffer.copy_(torch.where(flag, kept, buffer))


@contextmanager
def buffers_kept(models: Iterable[nn.Module]) -> Generator[None]:
    """Put back what running statistics were before the block, which ran on data that does not count."""
    before = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def no_gradients_of(parameters: Iterable[Tensor]) -> Generator[None]:
    """Replace what backwards in the block add to gradients by zeros, since 0 times NaN is NaN.

    Gradients of the window so far stay, and ranks reduce as ever. A sharded model's gradients have no place to do so.
    """
    hooks = [one.register_hook(torch.zeros_like) for one in parameters if one.requires_grad and one.is_leaf]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
