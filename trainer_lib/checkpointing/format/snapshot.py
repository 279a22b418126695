"""A copy of all tensors of a checkpoint in host memory, so that training may change them while a thread writes.

All snapshots are in the same memory, so only one may be in use at a time.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.checkpointing.format.overlapped_copies import OverlappedCopies
from trainer_lib.checkpointing.format.snapshot_memory import SnapshotMemory
from trainer_lib.foundation.device_types import pins_memory
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.tensor_files.safetensors import unsupported_reason
from trainer_lib.tensor_files.tensor_storage import without_aliases

if TYPE_CHECKING:
    from trainer_lib.tensor_files.file_contents import Content

_PIECE = 16 << 20  # bytes that a thread copies at a time
_THREADS = 4  # more threads do not make memory faster


class Snapshots:
    """Takes snapshots, one after the other, in the same memory.

    Attributes:
        memory: The memory.
        copies: The copies of the last snapshot that overlap with training; `None` if there are none.
    """

    def __init__(self) -> None:
        self.memory: SnapshotMemory = SnapshotMemory()
        self.copies: OverlappedCopies | None = None

    def allocate(self, tensors: Sequence[Tensor], is_needed: Callable[[], bool] = bool) -> None:
        """Allocate memory for these tensors, ahead of the first snapshot, or until it `is_needed`."""
        tensors = [tensor for tensor in tensors if tensor.device.type != "meta"]
        self.memory.allocate(tensors, _is_copied_asynchronously(tensors), is_needed)

    def take(self, files: "Mapping[str, Content]", left: Collection[int] = ()) -> "dict[str, Content]":
        """Return the files with copies in place of their tensors; this overwrites the copies of the last snapshot.

        Args:
            files: The files.
            left: The addresses of tensors whose copies may overlap with training.
        """
        from trainer_lib.tensor_files.file_contents import PickledTensors, Tensors

        with_tensors = {
            name: content for name, content in files.items() if isinstance(content, (Tensors, PickledTensors))
        }
        unique = {name: without_aliases(content.tensors) for name, content in with_tensors.items()}
        keys = [(name, key) for name, (tensors, _) in unique.items() for key in tensors]
        copied = self._copy_all([unique[name][0][key] for name, key in keys], left)
        copies = dict(zip(keys, copied, strict=True))
        snapshot = dict(files)
        for name, content in with_tensors.items():
            aliases = unique[name][1]
            tensors = {key: copies[name, aliases.get(key, key)] for key in content.tensors}
            # The thread that writes them shares the cores with training.
            snapshot[name] = replace(content, tensors=tensors, bypasses_cache=True)
        return snapshot

    def _copy_all(self, tensors: list[Tensor], left: Collection[int]) -> list[Tensor]:
        fits = [unsupported_reason(tensor) is None for tensor in tensors]
        fitting = [tensor for tensor, is_fit in zip(tensors, fits, strict=True) if is_fit]
        memory = iter(self.memory.take(fitting, _is_copied_asynchronously(fitting)))
        buffers = [
            next(memory) if is_fit else _separate_copy(tensor) for tensor, is_fit in zip(tensors, fits, strict=True)
        ]
        now: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        sources_of_later: list[Tensor] = []
        streams, streams_of_later = _SideStreams(), _SideStreams()
        for tensor, buffer, is_fit in zip(tensors, buffers, fits, strict=True):
            if not is_fit or not tensor.numel():
                continue
            source = tensor.detach()
            is_on_device, is_plain = pins_memory(source.device.type), source.device.type == "cpu" and _is_plain(source)
            is_left = source.data_ptr() in left and (is_on_device or is_plain)
            if is_on_device:
                (streams_of_later if is_left else streams).copy(source, buffer)
            elif is_plain:
                (later if is_left else now).append((source, buffer))
            else:
                buffer.copy_(source)
            if is_left:
                sources_of_later.append(source)
        _copy(now)
        streams.wait()
        copy_later = partial(_copy, later)
        self.copies = OverlappedCopies(sources_of_later, copy_later, streams_of_later) if sources_of_later else None
        return buffers


class _SideStreams:
    """Copies from accelerators on streams of their own, while they compute."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start the copy of a tensor; it runs after the kernels that were launched before."""
        device = source.device
        if device not in self._streams:
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            self._streams[device] = stream
        with self._streams[device]:
            target.copy_(source, non_blocking=True)
        source.record_stream(self._streams[device])  # a gathered tensor must not be freed before it is copied

    def hold_back(self) -> None:
        """Have each device begin what is launched from now on after the copies; the host waits for nothing."""
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors into others."""
    pieces = [piece for source, target in pairs for piece in _pieces(_bytes(source), _bytes(target))]
    # Not torch's own threads: training uses them, and they do not survive the fork of a loader's workers.
    threads = min(torch.get_num_threads(), _THREADS, len(pieces))
    if threads < 2:
        for target, source in pieces:
            np.copyto(target, source)
        return
    queue = deque(pieces)

    def copy_until_empty(_: int) -> None:
        with suppress(IndexError):
            while True:
                np.copyto(*queue.popleft())

    with ThreadPoolExecutor(threads) as pool:  # one task a thread, as a task costs as much as the copy of 100 KB
        for _ in pool.map(copy_until_empty, range(threads)):
            continue


def _is_copied_asynchronously(tensors: Sequence[Tensor]) -> bool:
    return any(pins_memory(tensor.device.type) for tensor in tensors)


def _pieces(source: Any, target: Any) -> list[tuple[Any, Any]]:
    return [(target[at : at + _PIECE], source[at : at + _PIECE]) for at in range(0, len(source), _PIECE)]


def _bytes(tensor: Tensor) -> Any:
    try:
        values = tensor.numpy()
    except TypeError:  # NumPy has no such type
        values = as_bytes(tensor).numpy()
    return values.reshape(-1).view(np.uint8)  # NumPy's views take a fifth of torch's time


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _separate_copy(tensor: Tensor) -> Tensor:
    # Tensors that only a pickle can hold are rare. The writer refuses those on the meta device, which have no values.
    return tensor if tensor.device.type == "meta" else tensor.detach().clone()
