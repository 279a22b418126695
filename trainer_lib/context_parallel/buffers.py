"""Buffers that hold this rank's part of a sequence inside a context, and the whole again after it."""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer_lib.context_parallel.sequence_layout import SequenceLayout
from trainer_lib.foundation.errors import ConfigurationError


@contextmanager
def cut_buffers(
    layout: SequenceLayout, buffers: Sequence[Tensor], dims: Sequence[int], left_cut: Collection[Tensor] = ()
) -> Generator[None]:
    """Return the context in which each tensor is this rank's part of itself.

    Args:
        layout: How sequences are cut.
        buffers: The tensors, which change in place.
        dims: The dimension of each that is the sequence.
        left_cut: Tensors that stay cut after the context.
    """
    ids = {id(tensor) for tensor in left_cut}
    shards = [layout.shard(tensor, dim) for tensor, dim in zip(buffers, dims, strict=True)]
    wholes = [tensor.detach() for tensor in buffers]
    _overwrite(buffers, shards)
    try:
        yield
    finally:
        kept = [(tensor, whole) for tensor, whole in zip(buffers, wholes, strict=True) if id(tensor) not in ids]
        _overwrite([tensor for tensor, _ in kept], [whole for _, whole in kept])


def checked_buffers(
    buffers: Sequence[Tensor] | None, dims: Sequence[int] | None, left_cut: Collection[Tensor] | None
) -> tuple[list[Tensor], list[int], list[Tensor]]:
    """Return the arguments of `maybe_context_parallel`, checked.

    Raises:
        ConfigurationError: If they do not fit together.
    """
    tensors, dims, left_cut = list(buffers or ()), list(dims or ()), list(left_cut or ())
    if len(tensors) != len(dims):
        raise ConfigurationError(
            f"buffer_seq_dims must name a dimension for each of the {len(tensors)} buffers (got {len(dims)})."
        )
    for number, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        if not isinstance(tensor, Tensor) or not -tensor.ndim <= dim < tensor.ndim:
            raise ConfigurationError(
                f"buffers[{number}] must be a tensor with the dimension {dim} (got "
                f"{f'shape {tuple(tensor.shape)}' if isinstance(tensor, Tensor) else type(tensor).__name__})."
            )
    ids = {id(tensor) for tensor in tensors}
    if any(id(tensor) not in ids for tensor in left_cut):
        raise ConfigurationError("no_restore_buffers has a tensor that is not in buffers. Give it in both.")
    return tensors, dims, left_cut


def _overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Have tensors refer to the data of others, whatever their shapes. Views of the same data stay unchanged."""
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.set_(value)  # type: ignore[call-overload]
