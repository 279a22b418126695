"""This file is how a process without data takes part in a step and leaves no trace."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_kept(models: Iterable[nn.Module]) -> Generator[None]:
    """Put back what running statistics were before the block, which ran on data that does not count."""
    before = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
