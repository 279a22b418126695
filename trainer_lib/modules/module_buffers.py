"""Buffers, counters and gradients as they were before a forward and backward that do not count."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.tensor_operations import foreach_copy_
from trainer_lib.modules.weights.tensor_slots import buffer_slots

_COUNTERS = (bool, int, float, type(None))  # attributes by which a forward counts, or remembers what it did


class Buffers:
    """The buffers of models, such as BatchNorm statistics, and their own generators, with a copy to restore them from.

    Args:
        models: The models.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._owners = [(slots, name) for slots in map(buffer_slots, modules.values()) for name, _ in slots.items()]
        values = (value for module in modules.values() for value in vars(module).values())
        self._generators = [value for value in values if isinstance(value, torch.Generator)]
        self._states: list[Tensor] = []  # of the generators
        self.exist: bool = bool(self._owners or self._generators)
        self._buffers: list[Tensor | None] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the buffers."""
        if self._generators:
            self._states = [generator.get_state() for generator in self._generators]
        # All of them: BatchNorm writes to its buffers without changing their version.
        before, self._buffers = self._buffers, [owner[name] for owner, name in self._owners]
        tensors = [buffer for buffer in self._buffers if buffer is not None]
        if len(before) == len(self._buffers) and all(
            buffer is earlier for buffer, earlier in zip(before, self._buffers, strict=True)
        ):
            if not tensors:
                return
            try:
                foreach_copy_(self._copies, tensors)
            except RuntimeError:  # a buffer was resized, as observers of quantization do, and does not fit its copy
                self._copies = [tensor.clone() for tensor in tensors]
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self, keeps_new_shapes: bool = False) -> None:
        """Restore the buffers; on request those of a new shape stay."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        copies = iter(self._copies)
        restored: list[tuple[Tensor, Tensor]] = []
        for (owner, name), buffer in zip(self._owners, self._buffers, strict=True):
            copy, current = None if buffer is None else next(copies), owner[name]
            if keeps_new_shapes and copy is not None and current is not None and current.shape != copy.shape:
                continue
            owner[name] = buffer
            if buffer is not None and copy is not None:
                if buffer.shape != copy.shape:
                    buffer.resize_(copy.shape)
                restored.append((buffer, copy))
        if restored:
            foreach_copy_([buffer for buffer, _ in restored], [copy for _, copy in restored])

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Restore the buffers where a flag on the device is true, without waiting for it.

        Those that were resized meanwhile stay, and so do generators: they cannot depend on the flag.
        """
        tensors = [buffer for buffer in self._buffers if buffer is not None]
        for buffer, copy in zip(tensors, self._copies, strict=True):
            if buffer.shape == copy.shape:
                here = flag.to(buffer.device)  # a split model's buffers are on several devices
                buffer.copy_(torch.where(here, copy, buffer))


@contextmanager
def buffers_kept(models: Iterable[nn.Module], keeps_new_shapes: bool = False) -> Generator[None]:
    """Restore buffers, generators and counters after the block, whose data does not count.

    Args:
        models: The models.
        keeps_new_shapes: Whether a buffer of a new shape stays, such as a bank that grows: where other ranks count
            their batch, DDP sends rank 0's buffers to ranks that must have the same shapes.
    """
    models = list(models)
    buffers, counters = Buffers(models), _counters(models)
    buffers.copy()
    try:
        yield
    finally:
        buffers.restore(keeps_new_shapes)
        for attributes, counts in counters:
            attributes.update((name, count) for name, count in counts.items() if name in attributes)


def _counters(models: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of each module, and those that are numbers or flags; torch's modules count nothing."""
    modules = [module for model in models for module in model.modules()]
    owners = [vars(module) for module in modules if not type(module).__module__.startswith("torch.")]
    return [
        (owner, {name: value for name, value in owner.items() if type(value) in _COUNTERS and name != "training"})
        for owner in owners
    ]


@contextmanager
def no_gradients_of(parameters: Iterable[Tensor]) -> Generator[None]:
    """Replace what backwards in the block add to gradients by zeros, since 0 times NaN is NaN.

    Gradients of the window so far stay, and ranks reduce as ever. A sharded model's gradients have no place to do so.
    """
    leaves = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
    hooks = [leaf.register_hook(_zeros_for) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros_for(gradient: Tensor | None) -> Tensor | None:
    # DDP's own node sends none back from outputs that the loss does not depend on.
    return None if gradient is None else torch.zeros_like(gradient)
