"""Copies of tensors that run beside training, while it computes what does not change the tensors."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class DeviceCopies(Protocol):
    """Copies that run on an accelerator, on streams of their own."""

    def hold_back(self) -> None:
        """Have the accelerator begin what is launched from now on after the copies; the host waits for nothing."""
        ...

    def wait(self) -> None:
        """Wait until all copies are complete."""
        ...


class OverlappedCopies:
    """Copies that have begun, and the proof that the tensors did not change meanwhile.

    Args:
        tensors: The tensors that are copied; training changes them only after `wait`.
        copy: Copies those in host memory.
        on_device: The copies of those on accelerators, which were launched.
    """

    def __init__(self, tensors: Sequence[Tensor], copy: Callable[[], None], on_device: DeviceCopies) -> None:
        self._tensors, self._copy, self._on_device = tensors, copy, on_device
        self._versions = versions_of(tensors)
        self._is_copied = threading.Event()  # what is in host memory
        self._lock = threading.Lock()
        self._was_unchanged: bool | None = None  # when training first waited

    def run(self) -> bool:
        """Copy, on the thread that saves; return whether all tensors still have the values of the call."""
        try:
            self._copy()
            is_unchanged = self._is_unchanged()
            self._is_copied.set()
            self._on_device.wait()
            with self._lock:
                # Where training waited, the accelerator changes the tensors after the copies.
                return is_unchanged and (self._is_unchanged() if self._was_unchanged is None else self._was_unchanged)
        finally:
            self.release()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        with self._lock:
            if self._was_unchanged is None:
                self._was_unchanged = self._is_unchanged()
        self._on_device.hold_back()
        self._is_copied.wait()

    def release(self) -> None:
        """Let `wait` return, whether or not the copies are complete, and keep no tensor alive."""
        self._is_copied.set()
        with self._lock:
            self._tensors, self._versions, self._copy = (), [], lambda: None

    def _is_unchanged(self) -> bool:
        return versions_of(self._tensors) == self._versions


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place, as torch counts it."""
    return [tensor._version for tensor in tensors]  # pyright: ignore[reportPrivateUsage]  # documented without a public name
