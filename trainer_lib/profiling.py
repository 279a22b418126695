"""Profile a block of code with torch's profiler, and write its traces."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.profiler_options import ProfileKwargs
from trainer_lib.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch.profiler import profile


class Profiling:
    """Profiles the blocks of one rank, and numbers their traces so that none is overwritten."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._written: Counter[Path] = Counter()

    @contextmanager
    def block(self, options: ProfileKwargs) -> "Generator[profile]":
        """Profile a block, write its traces, and wait until all ranks have written theirs."""
        if not isinstance(options, ProfileKwargs):
            raise ConfigurationError(f"profile takes a ProfileKwargs (got {options!r}).")
        if options.output_trace_dir is not None:
            Path(options.output_trace_dir).mkdir(parents=True, exist_ok=True)
        failures: list[Exception] = []
        with warnings.catch_warnings():
            # torch warns that a new cycle clears the events of the last one; cycles are meant to.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events", category=UserWarning)
            with dataclasses.replace(options, on_trace_ready=self._end_of_cycle(options, failures)).build() as profiler:
                yield profiler
        if failures:
            raise failures[0]
        if options.output_trace_dir is not None:
            self._group.barrier()

    def _end_of_cycle(self, options: ProfileKwargs, failures: list[Exception]) -> "Callable[[profile], None]":
        def end(profiler: "profile") -> None:
            # An error that passes through torch's profiler between cycles crashes the process: raise it at the end.
            try:
                if options.output_trace_dir is not None:
                    profiler.export_chrome_trace(str(self._next_file(Path(options.output_trace_dir))))
                if options.on_trace_ready is not None:
                    options.on_trace_ready(profiler)
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        return end

    def _next_file(self, folder: Path) -> Path:
        key = folder.absolute()
        self._written[key] += 1
        number = "" if self._written[key] == 1 else f"_{self._written[key]}"
        return folder / f"profile_{self._group.rank}{number}.json"
