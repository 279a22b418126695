"""Memory of tensors that a computation makes: what is alive now, and the most that was alive at a time."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_lib.foundation.tensors.pytree import tensors


class PeakStorage(TorchDispatchMode):
    """Counts the bytes of storages that operations make in a `with` block, until they are freed.

    Attributes:
        alive: The bytes that are alive now.
        peak: The most bytes that were alive at a time.
    """

    alive: int

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: dict[int, Any] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor that existed before, such as a weight, where an operation returns a view of it."""
        self._note(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on plain tensors; those on distributed ones are taken apart first."""
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)  # the object lives as long as the storage
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.alive -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.alive += size
        self.peak: int = max(self.peak, self.alive)
