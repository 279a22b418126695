"""Snapshots of CUDA memory, after an out-of-memory error or at a step, with the allocating source lines."""

from collections.abc import Iterator
from pathlib import Path

import torch

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.memory.executable_batch_size import is_out_of_memory

_logger = get_logger(__name__)


class MemorySnapshot(Callback):
    """Writes a snapshot of CUDA memory when training runs out of memory, and after a step of your choice.

    Each rank writes its own file, such as `memory/process-0-step-12-out-of-memory.pickle` in the run's folder, for
    https://pytorch.org/memory_viz. Allocations are recorded from the start of training, at a few microseconds each;
    earlier ones (the weights) appear without a source line. On other devices it warns and records nothing.

    Args:
        step: A step after which to write a snapshot too.
        max_entries: How many of the newest allocations and releases to keep; each takes a few kilobytes of host memory.
        folder: The folder for the files; by default `memory` in the run's folder.

    Example:
        >>> snapshot = MemorySnapshot(step=5)
    """

    def __init__(self, step: int | None = None, max_entries: int = 100_000, folder: str | Path | None = None) -> None:
        for name, value in (("step", step), ("max_entries", max_entries)):
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_whole and not (name == "step" and value is None):
                raise ConfigurationError(
                    f"MemorySnapshot({name}) must be a whole number of at least 1 (got {shown(value)})."
                )
        self._step, self._max_entries = step, max_entries
        self._folder = None if folder is None else Path(folder).expanduser()
        self._is_recording = False

    def on_fit_begin(self, run: Run) -> None:
        if self._folder is None and run.folder is None and getattr(run.args, "dry_run", False):
            return  # which writes nothing
        if self._folder is None and run.folder is None:
            raise ConfigurationError(
                "MemorySnapshot has no folder for its files. Give output_dir, or MemorySnapshot(folder=…)."
            )
        if not _is_on_cuda(run):
            _logger.warning_once(
                "MemorySnapshot records the memory of CUDA devices, and this run is on %s: it writes nothing.",
                run.accelerator.device.type,
            )
            return
        # torch documents these functions, and gives them private names.
        torch.cuda.memory._record_memory_history(max_entries=self._max_entries, stacks="python")  # pyright: ignore[reportPrivateUsage]
        self._is_recording = True

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._step:
            self._write(run, run.state.step, "")

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        del batch_size
        self._write(run, run.state.step + 1, "-out-of-memory")

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not any(is_out_of_memory(cause) for cause in _chain(error)):
            return
        path = self._write(run, run.state.step + 1, "-out-of-memory")
        if path is not None:
            error.add_note(f"A snapshot of the memory is in {path}; https://pytorch.org/memory_viz shows it.")

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]

    def _write(self, run: Run, step: int, suffix: str) -> Path | None:
        if not self._is_recording:
            return None
        folder = self._folder or (run.folder or Path()) / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"process-{run.accelerator.process_index}-step-{step}{suffix}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]
        run.record_event("memory_snapshot", file=str(path))
        return path


def _is_on_cuda(run: Run) -> bool:
    return run.accelerator.device.type == "cuda"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
