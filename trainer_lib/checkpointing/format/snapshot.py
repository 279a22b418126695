"""This file is a copy of all tensors of a state in host memory: once it is made, training may change them.

The memory is taken at the first snapshot and used again by each further one, so no two of them may be in use.
"""

import math
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.tensor_files.file_contents import Content, PickledTensors, Tensors
from trainer_lib.tensor_files.safetensors import why_not
from trainer_lib.tensor_files.tensor_storage import without_aliases

_ALIGNMENT = 64
_PIECE = 16 << 20  # bytes that one thread copies at a time
_THREADS = 4  # more do not make memory faster


class Snapshots:
    """Makes snapshots, one after the other, in the same memory."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, files: Mapping[str, Content]) -> dict[str, Content]:
        """Return the files with copies in the place of their tensors; the copies of an earlier snapshot are lost."""
        with_tensors = {name: one for name, one in files.items() if isinstance(one, (Tensors, PickledTensors))}
        kept = {name: without_aliases(one.tensors) for name, one in with_tensors.items()}
        places = [(name, key) for name, (own, _) in kept.items() for key in own]
        copies = self._copied([kept[name][0][key] for name, key in places])
        by_place = dict(zip(places, copies, strict=True))
        taken = dict(files)
        for name, content in with_tensors.items():
            aliases = kept[name][1]
            tensors = {key: by_place[name, aliases.get(key, key)] for key in content.tensors}
            taken[name] = replace(content, tensors=tensors)
        return taken

    def _copied(self, tensors: list[Tensor]) -> list[Tensor]:
        buffers = self._buffers(tensors)
        pieces: list[tuple[Any, Any]] = []
        streams = _SideStreams()
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if buffer.data_ptr() == tensor.data_ptr() or not tensor.numel():
                continue
            source = tensor.detach()
            if source.device.type != "cpu":
                streams.copy(source, buffer)
            elif _is_plain(source):
                pieces += _pieces(_bytes(source), _bytes(buffer))
            else:
                buffer.copy_(source)
        _copy(pieces)
        streams.wait()
        return buffers

    def _buffers(self, tensors: list[Tensor]) -> list[Tensor]:
        fitting = [why_not(tensor) is None for tensor in tensors]
        starts: list[int] = []
        end = 0
        for tensor, fits in zip(tensors, fitting, strict=True):
            starts.append(end)
            end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT if fits else 0
        if self._memory.numel() < end:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that there is never more than one
            # What is copied from an accelerator behind its back has to lie where it can reach it.
            is_pinned = any(fits and one.device.type != "cpu" for one, fits in zip(tensors, fitting, strict=True))
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=True) if is_pinned else _large_memory(end)
        return [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape) if fits else _own(tensor)
            for tensor, fits, start in zip(tensors, fitting, starts, strict=True)
        ]


def _large_memory(size: int) -> Tensor:
    """Return memory in large pages where the system has them: the first write to small ones takes twice the copy."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _SideStreams:
    """Copies from an accelerator, beside what it computes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Have a tensor copied once all that is to be done to it before is done."""
        device = source.device
        if device not in self._streams:
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            self._streams[device] = stream
        with self._streams[device]:
            target.copy_(source, non_blocking=True)
        source.record_stream(self._streams[device])  # what was gathered for this may be freed before it is copied

    def wait(self) -> None:
        """Wait until all copies are made."""
        for stream in self._streams.values():
            stream.synchronize()


def _copy(pieces: list[tuple[Any, Any]]) -> None:
    # Not torch's own threads: those are the training's, and do not survive the fork of a loader's workers.
    threads = min(torch.get_num_threads(), _THREADS, len(pieces))
    if threads < 2:
        for target, source in pieces:
            np.copyto(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: np.copyto(*piece), pieces):
            continue


def _pieces(source: Any, target: Any) -> list[tuple[Any, Any]]:
    return [(target[at : at + _PIECE], source[at : at + _PIECE]) for at in range(0, len(source), _PIECE)]


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _own(tensor: Tensor) -> Tensor:
    # What only a pickle can hold is rare: memory of its own. What has no values is refused by who writes it.
    return tensor if tensor.device.type == "meta" else tensor.detach().clone()
