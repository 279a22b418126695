"""A copy of all tensors of a checkpoint in host memory, so that training may change them while a thread writes.

The first snapshot allocates the memory and later ones reuse it, so only one snapshot may be in use at a time.
"""

import math
import mmap
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.checkpointing.format.overlapped_copies import OverlappedCopies
from trainer_lib.foundation.device_types import pins_memory
from trainer_lib.tensor_files.file_contents import Content, PickledTensors, Tensors
from trainer_lib.tensor_files.safetensors import unsupported_reason
from trainer_lib.tensor_files.tensor_storage import without_aliases

_ALIGNMENT = 64
_PIECE = 16 << 20  # bytes that a thread copies at a time
_THREADS = 4  # more threads do not make memory faster


class Snapshots:
    """Takes snapshots, one after the other, in the same memory.

    Attributes:
        copies: The copies of the last snapshot that are left to the thread that saves; `None` if there are none.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.copies: OverlappedCopies | None = None

    def take(self, files: Mapping[str, Content], left: Collection[int] = ()) -> dict[str, Content]:
        """Return the files with copies in place of their tensors; this overwrites the copies of the last snapshot.

        Args:
            files: The files.
            left: The addresses of tensors in host memory whose copies are left to the thread that saves.
        """
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
            snapshot[name] = replace(content, tensors=tensors)
        return snapshot

    def _copy_all(self, tensors: list[Tensor], left: Collection[int]) -> list[Tensor]:
        buffers = self._buffers(tensors)
        pieces: list[tuple[Any, Any]] = []
        later: list[tuple[Any, Any]] = []
        sources_of_later: list[Tensor] = []
        streams = _SideStreams()
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if buffer.data_ptr() == tensor.data_ptr() or not tensor.numel():
                continue
            source = tensor.detach()
            if pins_memory(source.device.type):
                streams.copy(source, buffer)
            elif source.device.type != "cpu":
                buffer.copy_(source)
            elif _is_plain(source) and source.data_ptr() in left:
                later += _pieces(_bytes(source), _bytes(buffer))
                sources_of_later.append(source)
            elif _is_plain(source):
                pieces += _pieces(_bytes(source), _bytes(buffer))
            else:
                buffer.copy_(source)
        _copy(pieces)
        streams.wait()
        self.copies = OverlappedCopies(sources_of_later, partial(_copy, later)) if later else None
        return buffers

    def _buffers(self, tensors: list[Tensor]) -> list[Tensor]:
        fit = [unsupported_reason(tensor) is None for tensor in tensors]
        starts: list[int] = []
        end = 0
        for tensor, fits in zip(tensors, fit, strict=True):
            starts.append(end)
            end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT if fits else 0
        if self._memory.numel() < end:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
            # An asynchronous copy from an accelerator needs pinned memory.
            is_pinned = any(fits and pins_memory(tensor.device.type) for tensor, fits in zip(tensors, fit, strict=True))
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=True) if is_pinned else _large_memory(end)
        return [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if fits
            else _separate_copy(tensor)
            for tensor, fits, start in zip(tensors, fit, starts, strict=True)
        ]


def _large_memory(size: int) -> Tensor:
    """Return memory in huge pages if the system has them: the first write to small pages takes twice as long."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


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

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()


def _copy(pieces: list[tuple[Any, Any]]) -> None:
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


def _pieces(source: Any, target: Any) -> list[tuple[Any, Any]]:
    return [(target[at : at + _PIECE], source[at : at + _PIECE]) for at in range(0, len(source), _PIECE)]


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _separate_copy(tensor: Tensor) -> Tensor:
    # Tensors that only a pickle can hold are rare. The writer refuses those on the meta device, which have no values.
    return tensor if tensor.device.type == "meta" else tensor.detach().clone()
