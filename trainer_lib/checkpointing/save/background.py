"""Background saves: a thread writes one checkpoint at a time, and the next call that waits for it raises its error."""

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.processes.thread_priority import yield_cores

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_lib.checkpointing.format.overlapped_copies import OverlappedCopies
    from trainer_lib.checkpointing.format.snapshot import Snapshots

_logger = get_logger(__name__)

# Seconds that a rank that ends with an error waits for the other ranks, which may never answer.
_PATIENCE_AFTER_AN_ERROR = 10.0

UPLOAD_THREADS = "upload"  # the prefix of the names of threads that upload files


class BackgroundSaves:
    """The thread that writes checkpoints, with the snapshot and the process group that it uses.

    Attributes:
        overlapping: The optimizers whose weights and states change only when they step, after `finish_copies`: their
            copies overlap with training.
        copies: The copies that `finish_copies` waits for; `None` if there are none.
    """

    def __init__(self) -> None:
        self.overlapping: Sequence[Optimizer] = ()
        self.copies: OverlappedCopies | None = None
        self._snapshots: Snapshots | None = None
        self._allocating: threading.Thread | None = None
        self._is_needed = threading.Event()  # set when the memory that is being allocated is needed
        self._thread: threading.Thread | None = None
        self._target: AnyPath | None = None
        self._error: BaseException | None = None
        self._written_at: float | None = None
        self._hang: str | None = None
        self._has_ended = False
        self._released = threading.Event()  # set when the save has ended or hangs
        self.ended_at = 0.0  # the end of the last save, by time.monotonic
        self.nonfinite: list[str] = []  # the tensors of the last save that are not finite, on any rank
        self.infinite_states: list[str] = []  # the optimizer states of the last save with an infinity
        self._groups: tuple[ProcessGroup, ProcessGroup] | None = None

    @property
    def snapshots(self) -> "Snapshots":
        """The memory that tensors are copied to before the thread writes them."""
        from trainer_lib.checkpointing.format.snapshot import Snapshots

        self._end_allocating()
        if self._snapshots is None:
            self._snapshots = Snapshots()
        return self._snapshots

    @property
    def is_running(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its part, and not yet waiting for the other ranks."""
        return self.is_running and self._written_at is None

    @property
    def hang(self) -> str | None:
        """Where the save hangs, as reported to `report_hang`; `None` if it does not hang."""
        return self._hang if self.is_running else None

    @property
    def target(self) -> "AnyPath | None":
        """The folder of the save that is being written."""
        return self._target

    @property
    def threads(self) -> list[int]:
        """The ids of the threads that write: those that upload files, and the thread of the save."""
        uploading = [thread for thread in threading.enumerate() if thread.name.startswith(UPLOAD_THREADS)]
        return [
            thread.ident for thread in (*uploading, self._thread) if thread is not None and thread.ident is not None
        ]

    def group(self, training_group: ProcessGroup) -> ProcessGroup:
        """Return a second group of the same ranks for the thread; the first call, on all ranks, creates it."""
        if self._groups is None or self._groups[0] is not training_group:
            self._groups = training_group, training_group.another()
        return self._groups[1]

    def allocate(self, whole: bool) -> None:
        """Allocate memory for copies that overlap, on a thread, ahead of the first save and after an update.

        Args:
            whole: Whether this rank saves the whole of sharded tensors, and not its shards.
        """
        tensors = _changed_by_steps(self.overlapping)
        tensors = tensors if whole else _shards(tensors)
        if self._allocating is None and not self.snapshots.memory.size:
            self._is_needed.clear()
            allocate = partial(_allocate, self.snapshots, tensors, self._is_needed.is_set)
            self._allocating = threading.Thread(target=allocate, name="memory of checkpoints", daemon=True)
            self._allocating.start()

    def changed_by_steps(self) -> set[int]:
        """Return the addresses of the tensors that only steps of the `overlapping` optimizers change."""
        return {tensor.data_ptr() for tensor in _shards(_changed_by_steps(self.overlapping))}

    def finish_copies(self) -> None:
        """Wait until the last snapshot is complete, so that weights and optimizer states may change."""
        if self.copies is not None:
            self.copies.wait()
            self.copies = None

    def start(self, target: AnyPath, work: Callable[[], object], copies: "OverlappedCopies | None" = None) -> None:
        """Write the checkpoint `target` by calling `work` on a thread; wait for the previous save first.

        Args:
            target: The folder of the checkpoint.
            work: Makes the copies, and writes.
            copies: The copies that `work` makes.
        """
        _wait_at_exit(self)
        self._target, self._error, self._written_at = target, None, None
        self._hang, self._has_ended, self._released = None, False, threading.Event()
        # A daemon thread, because Python waits without limit for any other; `at_exit` waits instead.
        self._thread = threading.Thread(
            target=self._run, args=(work, copies), name=f"save of {target.name}", daemon=True
        )
        self._thread.start()
        self.copies = copies

    def mark_written(self) -> None:
        """Record that this rank has written its part; the save now waits for the other ranks."""
        self._written_at = time.monotonic()

    def report_hang(self, where: str | None) -> None:
        """Report that the save hangs, so that no call waits for it; `None` reports that it makes progress again."""
        previous, self._hang = self._hang, where
        if where is not None:
            self._released.set()
        elif previous is not None:
            self._released = threading.Event()
            if self._has_ended:
                self._released.set()

    def wait_until_released(self) -> None:
        """Wait until the save has ended, or hangs."""
        if self._thread is not None:
            self._released.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: If it could not be written. It is raised once.
            UnwritableError: If the save hangs.
        """
        self.wait_until_released()
        if (hang := self.hang) is not None:
            raise UnwritableError(hang)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kind = UnwritableError if isinstance(error, UnwritableError) else CheckpointError
            raise kind(f"The checkpoint {self._target} could not be saved in the background. {error}") from error

    def release(self) -> None:
        """Wait for the save, log its error if it failed, and free the memory of the snapshot."""
        with self._errors_logged():
            self.wait()
        self._end_allocating()
        self._snapshots = self.copies = None

    def at_exit(self) -> None:
        """Wait for the save at the end of the process.

        A save that hangs is not waited for. After an error in this process, other ranks get a few seconds to answer.
        """
        if self.hang is not None:  # the hang was logged
            # If it hangs on another rank, the thread is in a collective here. When that rank ends, the collective
            # raises; while Python shuts down, that would abort the process.
            if self._thread is not None and self._written_at is not None:
                self._thread.join(_PATIENCE_AFTER_AN_ERROR)
            return
        while self.is_running and hasattr(sys, "last_value"):
            if self._written_at is not None and time.monotonic() > self._written_at + _PATIENCE_AFTER_AN_ERROR:
                _logger.error("The checkpoint %s is not saved: the other ranks did not answer.", self._target)
                return
            time.sleep(0.05)
        with self._errors_logged():
            self.wait()

    def _end_allocating(self) -> None:
        if self._allocating is not None:
            self._is_needed.set()
            self._allocating.join()
            self._allocating = None

    def _run(self, work: Callable[[], object], copies: "OverlappedCopies | None") -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it on the main thread
            self._error = error
        if copies is not None:
            copies.release()  # also where an error came before them
        self.ended_at: float = time.monotonic()
        self._has_ended = True
        self._released.set()

    @contextlib.contextmanager
    def _errors_logged(self) -> Generator[None]:
        try:
            yield
        except CheckpointError as error:
            _logger.error("%s", error, main_process_only=False)


def _changed_by_steps(optimizers: "Sequence[Optimizer]") -> list[Tensor]:
    values: list[Any] = []
    for optimizer in optimizers:
        values += [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        values += [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def _shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    from trainer_lib.foundation.tensors.local_shards import (
        local_shard,  # which a first step without saves can do without
    )

    return [local_shard(tensor) for tensor in tensors]


def _allocate(snapshots: "Snapshots", tensors: Sequence[Tensor], is_needed: Callable[[], bool]) -> None:
    yield_cores()
    # Without memory the first save raises, or finds that it needs less.
    with contextlib.suppress(OSError, MemoryError, RuntimeError):
        snapshots.allocate(tensors, is_needed)


_known: "weakref.WeakSet[BackgroundSaves]" = weakref.WeakSet()
# A forked process, such as a data worker, runs exit handlers too, and has no thread that would end its parent's saves.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_known.clear)
_registered: set[int] = set()  # the ids of the processes with exit handlers; a forked process needs its own


def _wait_at_exit(saves: BackgroundSaves) -> None:
    _known.add(saves)
    if os.getpid() not in _registered:
        _registered.add(os.getpid())
        # Registered after the process group was created, so it runs before the group is destroyed.
        atexit.register(_at_exit)
        # atexit runs after Python has ended all thread pools, which uploads need. The hook that runs earlier is
        # private. A forked process runs the finalizers of multiprocessing only.
        threading_at_exit: Callable[[Callable[[], None]], None] | None = vars(threading).get("_register_atexit")
        if threading_at_exit is not None:
            threading_at_exit(_at_exit)
        util.Finalize(None, _at_exit, exitpriority=100)


def _at_exit() -> None:
    for saves in list(_known):
        saves.at_exit()
