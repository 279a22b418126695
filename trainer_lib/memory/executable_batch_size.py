"""`find_executable_batch_size`: retry a function with smaller batch sizes until it fits into memory."""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch

from trainer_lib.foundation.errors import ConfigurationError, NoExecutableBatchSizeError, SignatureError
from trainer_lib.memory.release_memory import clear_device_cache
from trainer_lib.options.base import check_count

_logger = logging.getLogger(__name__)  # not get_logger: each rank logs its own retries
# Messages of allocators that raise a plain RuntimeError; cuDNN finds no algorithm if its workspace does not fit.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cudnn_status_not_supported",
    "cublas_status_alloc_failed",
    "devmem allocation failed",
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function to retry it with smaller batch sizes until it does not run out of memory.

    The decorator passes the batch size as the first argument; callers leave it out. The next call starts at the size
    that fitted. After a failed attempt the decorator frees its memory: local variables, reference cycles, the device's
    cache. Call `accelerator.free_memory()` at the start of the function, to release prepared objects of an earlier
    attempt too.

    Each rank searches independently, since ranks may fail at different places and cannot synchronize there. If ranks
    must train together, start from a size that fits all of them.

    Args:
        function: The function.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size to try; by default 0.9 of the last.

    Raises:
        NoExecutableBatchSizeError: If even the smallest size does not fit; its cause is the last error.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, epochs):
        ...     return batch_size * epochs
        >>> train(2)
        128
    """
    check_count("starting_batch_size", starting_batch_size, at_least=0)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _Attempts(function, starting_batch_size, reduce_batch_size_fn).as_function()


class _Attempts:
    """A function and its current batch size."""

    def __init__(self, function: Callable[..., Any], size: int, reduce: Callable[[], int] | None) -> None:
        self.function = function
        self.size = size
        self.reduce = reduce
        self.name = getattr(function, "__name__", type(function).__name__)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.signature = inspect.signature(function)
        self.names = [name for name, each in self.signature.parameters.items() if each.kind in kinds]
        takes_any = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in self.signature.parameters.values())
        if not self.names and not takes_any:
            raise SignatureError(f"`{self.name}` must take the batch size as its first argument, and takes none.")

    def as_function(self) -> Callable[..., Any]:
        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(args, kwargs)
            clear_device_cache(garbage_collection=True)
            return self.run(args, kwargs)

        return call

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the arguments do not fit the function, in particular if the caller passed a batch size too."""
        try:
            self.signature.bind(self.size, *args, **kwargs)
        except TypeError as error:
            first = set(self.names[:1])
            if len(args) < len(self.names) and not first & set(kwargs):
                raise SignatureError(f"`{self.name}` does not take these arguments: {error}.") from error
            rest = dict(zip(self.names[1:], args if first & set(kwargs) else args[1:], strict=False)) | kwargs
            call = ", ".join(f"{name}={value!r}" for name, value in rest.items() if name not in first)
            raise SignatureError(
                f"Batch size was passed into `{self.name}` as the first argument when called. Leave it out, as "
                f"find_executable_batch_size gives it: `{self.name}({call})`."
            ) from error

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        failure: BaseException | None = None
        while self.size > 0:
            try:
                return self.function(self.size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            free_memory_of(failure)
            failed, self.size = self.size, self.next_size()
            _logger.warning("`%s` ran out of memory at batch size %d. Next: %d.", self.name, failed, self.size)
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero: `{self.name}` does not fit into memory."
        ) from failure

    def next_size(self) -> int:
        if self.reduce is None:
            return int(self.size * 0.9)
        size = self.reduce()
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < self.size:
            raise ConfigurationError(
                f"reduce_batch_size_fn must return a whole number below the last one ({self.size}) (got {size!r})."
            )
        return size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or a device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def free_memory_of(error: BaseException | None) -> None:
    """Free the memory of a failed attempt: its traceback keeps the frames and their variables alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    clear_device_cache(garbage_collection=True)
