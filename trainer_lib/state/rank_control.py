"""Running code on some ranks only, in order, or on parts of the inputs."""

import functools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.process_group import ProcessGroup


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing."""


class ProcessControl:
    """Methods to run code on some ranks only, in order, or on parts of the inputs."""

    process_index: int
    local_process_index: int
    num_processes: int
    group: ProcessGroup
    data_group: ProcessGroup

    @property
    def use_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this.

        Example:
            >>> from trainer_lib import PartialState
            >>> PartialState().wait_for_everyone()
        """
        self.group.barrier()

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Run a `with` block on the main process first, then on the other ranks.

        Example:
            >>> from trainer_lib import PartialState
            >>> with PartialState().main_process_first():
            ...     print("download and cache once, read many times")
            download and cache once, read many times
        """
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """Run a `with` block on the main process of each machine first, then on the other ranks."""
        with self._goes_first(self.is_local_main_process):
            yield

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it; it returns `None` on other ranks.

        Example:
            >>> from trainer_lib import PartialState
            >>> @PartialState().on_main_process
            ... def report(loss):
            ...     print("loss", loss)
            >>> report(0.5)
            loss 0.5
        """
        return self._gated(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process of each machine runs it."""
        return self._gated(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the last rank runs it."""
        return self._gated(function, lambda: self.is_last_process)

    def on_process(
        self,
        function: Callable[..., Any] | None = None,
        process_index: int | None = None,
        *,
        process_idx: int | None = None,
    ) -> Any:
        """Decorate a function so that only process `process_index` runs it (`process_idx`: its older name).

        Example:
            >>> from trainer_lib import PartialState
            >>> @PartialState().on_process(process_index=0)
            ... def report(loss):
            ...     print("loss", loss)
            >>> report(0.5)
            loss 0.5
        """
        index = _required("process_index", process_idx if process_index is None else process_index)
        return self._gated(function, lambda: self.process_index == index)

    def on_local_process(
        self,
        function: Callable[..., Any] | None = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Any:
        """Decorate a function so that only process `local_process_index` of each machine runs it."""
        local_index = local_process_idx if local_process_index is None else local_process_index
        index = _required("local_process_index", local_index)
        return self._gated(function, lambda: self.local_process_index == index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine, above the progress bars."""
        if self.is_local_main_process:
            tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)  # without it no bar is shown
            bars = tqdm if getattr(tqdm, "_instances", None) else None
            with nullcontext() if bars is None else bars.external_write_mode(file=kwargs.get("file")):
                print(*args, **kwargs)  # noqa: T201 - printing is the purpose

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """Give each rank its part of `inputs` within a `with` block.

        Args:
            inputs: A list, tuple, tensor, array, table of pandas, dataset with `select`, or a dict of those of one
                length, which may be nested. A string is one input: all ranks get it whole.
            apply_padding: Repeat the last input so that all ranks get the same number.

        Example:
            >>> from trainer_lib import PartialState
            >>> with PartialState().split_between_processes(["a dog", "a cat"]) as prompts:
            ...     print(prompts)
            ['a dog', 'a cat']
        """
        yield self._part_of(inputs, apply_padding)

    def _part_of(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, (str, bytes)):
            return inputs
        total = _common_length(inputs)
        rank = self.data_group.rank
        share, rest = divmod(total, self.data_group.size)
        start = rank * share + min(rank, rest)
        indices = list(range(start, start + share + (rank < rest)))
        if apply_padding and total:
            indices += [total - 1] * (share + (rest > 0) - len(indices))
        if len(indices) == total:  # all of them, as they are
            return inputs
        return _picked(inputs, indices)

    @contextmanager
    def _goes_first(self, is_first: bool) -> Generator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def _gated(self, function: Callable[..., Any] | None, may_run: Callable[[], bool]) -> Any:
        if function is None:
            return functools.partial(self._gated, may_run=may_run)

        @functools.wraps(function)
        def gated(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if may_run() else None

        return gated


def _required(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigurationError(f"{name} is missing. Pass the rank that runs the function, such as {name}=0.")
    return value


def _common_length(inputs: Any) -> int:
    lengths = dict(_lengths(inputs, ""))
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            f"split_between_processes needs values of one length (got {lengths}). Make them equally long."
        )
    return next(iter(lengths.values()), 0)


def _lengths(inputs: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the length of each value that is split, with its name; strings are not split."""
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _lengths(value, f"{name}.{key}" if name else str(key))
    elif not isinstance(inputs, (str, bytes)):
        if not hasattr(inputs, "__len__") or getattr(inputs, "ndim", 1) == 0:
            raise _unsplittable(inputs, name)
        yield name, len(inputs)


def _unsplittable(inputs: Any, name: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"split_between_processes cannot split {name or 'inputs'} (got {shown(inputs)}): it has no items in a fixed "
        "order. Give a list, tuple, tensor, array, dataset, or a dict of those."
    )


def _picked(inputs: Any, indices: list[int]) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _picked(value, indices) for key, value in inputs.items()}
    if isinstance(inputs, (str, bytes)):
        return inputs
    if isinstance(inputs, Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, np.ndarray):
        return inputs[np.array(indices, dtype=int)]
    if hasattr(inputs, "iloc"):
        return inputs.iloc[indices]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if not hasattr(inputs, "__getitem__"):
        raise _unsplittable(inputs)
    picked = [inputs[index] for index in indices]
    return tuple(picked) if isinstance(inputs, tuple) else picked
