"""How workers pass tensors on to training: small ones as bytes in their messages, large ones in shared memory.

For each tensor in shared memory torch opens a socket and passes a file descriptor, which takes training up to 0.3 ms.
The other way, generators that a dataset holds are bytes too.
"""

import math
from ctypes import string_at
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_SMALL = 128 << 10  # bytes: larger ones take longer through the pipe than a file descriptor takes
_largest_as_bytes = 0


def send_small_tensors_as_bytes() -> None:
    """Have this process, a worker, write small tensors into the messages of its queues."""
    global _largest_as_bytes
    _largest_as_bytes = _SMALL
    ForkingPickler.register(Tensor, _reduce)


def send_generators_as_bytes() -> None:
    """Have this process, training, send the generators of a dataset to workers that are not forked from it.

    Torch sends the state of a generator as a file, which it closes before a worker opens it.
    """
    ForkingPickler.register(torch.Generator, _reduce_generator)


def is_shared(size: int) -> bool:
    """Whether this process, a worker, passes tensors of so many bytes on in shared memory."""
    return size > _largest_as_bytes


def shared_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return memory that this worker passes on without another copy; `None` for tensors that it sends as bytes."""
    size = math.prod(shape) * dtype.itemsize
    if not is_shared(size):
        return None
    # As in torch's `default_collate`: share_memory_() would copy what is not written yet.
    storage = torch.UntypedStorage._new_shared(size)  # pyright: ignore[reportPrivateUsage]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    kind, arguments, (seed, offset, state) = generator.__reduce__()
    return _generator_of, (kind, arguments, seed, offset, state.numpy().tobytes())


def _generator_of(kind: Any, arguments: tuple[Any, ...], seed: int, offset: int | None, state: bytes) -> Any:
    generator = kind(*arguments)
    generator.__setstate__((seed, offset, torch.frombuffer(bytearray(state), dtype=torch.uint8)))
    return generator


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    is_small = tensor.is_cpu and tensor.layout is torch.strided and 0 < tensor.nbytes <= _largest_as_bytes
    if not is_small or not tensor.is_contiguous() or tensor.is_nested or tensor.requires_grad:
        return reduce_tensor(tensor)
    plain = tensor.resolve_conj().resolve_neg()  # torch itself would forget the sign
    return _tensor_of, (string_at(plain.data_ptr(), plain.nbytes), plain.dtype, tuple(plain.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
