"""Copies of tensors that run on the thread that saves, while training computes what does not change the tensors."""

import threading
from collections.abc import Callable, Sequence

from torch import Tensor


class OverlappedCopies:
    """Copies that have begun, and the proof that the tensors did not change meanwhile.

    Args:
        tensors: The tensors that are copied; training changes them only after `wait`.
        copy: Copies them.
    """

    def __init__(self, tensors: Sequence[Tensor], copy: Callable[[], None]) -> None:
        self._tensors, self._copy = tensors, copy
        self._versions = versions_of(tensors)
        self._is_complete = threading.Event()

    def run(self) -> bool:
        """Copy, on the thread that saves; return whether all tensors still have the values of the call."""
        try:
            self._copy()
            return versions_of(self._tensors) == self._versions
        finally:
            self.release()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._is_complete.wait()

    def release(self) -> None:
        """Let `wait` return, whether or not the copies are complete, and keep no tensor alive."""
        self._is_complete.set()
        self._tensors, self._copy = (), lambda: None


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place, as torch counts it."""
    return [tensor._version for tensor in tensors]  # pyright: ignore[reportPrivateUsage]  # documented without a public name
