"""This file is the search for a batch size that fits into memory."""

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

_logger = logging.getLogger(__name__)  # not the engine's: a retry concerns the process that makes it
# How allocators say it that raise a plain RuntimeError; cuDNN finds no algorithm where its workspace does not fit.
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
    """Call a function with smaller and smaller batch sizes until it does not run out of memory; a decorator.

    The batch size becomes the function's first argument; whoever calls it leaves it out. What was found is kept for
    the next call. What a failed attempt held is freed: the variables of its functions, cycles, the device's cache.
    Begin the function with `accelerator.free_memory()`, so that what an earlier attempt prepared is let go of too.

    Each process goes its own way, as they may fail at different places and could not meet to agree. With several
    processes that must train together, start from a size that fits all of them.

    Args:
        function: The function.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size to try; by default 0.9 of the last.

    Raises:
        NoExecutableBatchSizeError: If even the smallest one does not fit; its cause is the last error.

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
    """A function, and the batch size at which it is tried."""

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
            raise SignatureError(f"`{self.name}` has to take the batch size as its first argument, and it takes none.")

    def as_function(self) -> Callable[..., Any]:
        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(args, kwargs)
            clear_device_cache(garbage_collection=True)
            return self.run(args, kwargs)

        return call

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the function cannot be called so, in particular if the caller gave the batch size too."""
        try:
            self.signature.bind(self.size, *args, **kwargs)
        except TypeError as error:
            own = set(self.names[:1])
            if len(args) < len(self.names) and not own & set(kwargs):
                raise SignatureError(f"`{self.name}` cannot be called so: {error}.") from error
            rest = dict(zip(self.names[1:], args if own & set(kwargs) else args[1:], strict=False)) | kwargs
            call = ", ".join(f"{name}={value!r}" for name, value in rest.items() if name not in own)
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
            let_go(failure)
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
                f"reduce_batch_size_fn must return a whole number below the last one ({self.size}), got {size!r}."
            )
        return size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or a device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def let_go(error: BaseException | None) -> None:
    """Free what a failed attempt held: its frames still know their variables, through the traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    clear_device_cache(garbage_collection=True)
