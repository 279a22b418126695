"""Buffers that a model's state dict leaves out, but training changes, such as a memory bank."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.tensor_digests import digests
from trainer_lib.modules.weights.tensor_slots import buffer_slots, non_persistent_buffers


class ChangedBuffers:
    """The non-persistent buffers that differ from those that a fit began with.

    Masks and tables, which a model creates again, do not change, and are not saved. A checkpoint without a buffer is
    one with its first value: this object keeps copies of these, equal ones once.

    Args:
        models: The user's models by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        buffers = self._buffers()
        self._first = _digests(buffers)
        distinct = {digest: name for name, digest in self._first.items()}
        self._values = {digest: buffers[name].detach().to("cpu", copy=True) for digest, name in distinct.items()}
        self._unset = {name for name, slots, last in self._places() if slots[last] is None}

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers that changed, by name."""
        buffers = self._buffers()
        return {name: buffers[name] for name, digest in _digests(buffers).items() if self._first.get(name) != digest}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set buffers to those of a state, if the models still have them, and the others to their first values."""
        first = {name: self._values[self._first[name]] for name in self.state_dict() if name in self._first}
        for name, slots, last in self._places():
            saved, buffer = state.get(name, first.get(name)), slots[last]
            if saved is None:
                slots[last] = None if name in self._unset else buffer
            elif buffer is not None and saved.shape == buffer.shape:
                buffer.copy_(saved)
            else:  # a bank that grows, or that the first forward makes
                slots[last] = saved.to(self._device if buffer is None else buffer.device, copy=True)

    @property
    def _device(self) -> torch.device:
        tensors = (tensor for model in self._models.values() for tensor in (*model.parameters(), *model.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _buffers(self) -> dict[str, Tensor]:
        found: dict[str, Any] = {name: slots[last] for name, slots, last in self._places()}
        return {name: buffer for name, buffer in found.items() if type(buffer) is Tensor and not buffer.is_meta}

    def _places(self) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
        for prefix, model in self._models.items():
            for path, module in model.named_modules():
                for last in non_persistent_buffers(module):
                    name = canonical_name(".".join(part for part in (prefix, path, last) if part))
                    yield name, buffer_slots(module), last


def _digests(buffers: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    sums = digests(list(buffers.values()))
    pairs = zip(buffers.items(), sums, strict=True)
    return {name: (buffer.shape, buffer.dtype, total) for (name, buffer), total in pairs}
