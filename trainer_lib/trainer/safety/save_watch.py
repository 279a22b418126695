"""Whether the save in the background makes progress, and where it hangs when it makes none for `hang_timeout`."""

import threading
from collections.abc import Iterable, Sequence

from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.logging import get_logger
from trainer_lib.trainer.safety.thread_stacks import Stack

_logger = get_logger(__name__)


class SaveWatch:
    """Looks at the threads that write.

    Args:
        saves: What they belong to.
        timeout: The seconds without progress after which a save hangs.

    Attributes:
        is_moving: Whether this rank's part of a save moved since the last look.
    """

    def __init__(self, saves: BackgroundSaves, timeout: float) -> None:
        self._saves, self._timeout = saves, timeout
        self._places: list[list[tuple[int, int]]] | None = None
        self._moved = 0.0
        self._has_found = self._has_heard = False  # a hang: on this rank, or reported by another
        self.is_moving = False

    def look(self, now: float) -> None:
        """Look where the threads are, and mark a save that hangs until it moves again."""
        stacks = [Stack(thread) for thread in self._saves.threads] if self._saves.is_running else []
        before, self._places = self._places, [stack.places for stack in stacks]
        is_held_up = bool(stacks) and not any(stack.waits_for_ranks for stack in stacks)
        has_moved = is_held_up and self._places != before
        self.is_moving: bool = has_moved and self._saves.is_writing
        if not is_held_up or has_moved:
            self._moved = now
        if has_moved and self._has_found:
            self._has_found = False
            self._saves.report_hang(None)
        elif now - self._moved >= self._timeout and not self._has_found:
            self._tell_hang(now - self._moved)

    def forgive(self, now: float) -> None:
        """Count from now: the process was stopped."""
        self._moved = now

    @property
    def report(self) -> list[str]:
        """The folder of a save that hangs on this rank, and where it hangs; for the other ranks."""
        hang = self._saves.hang if self._has_found else None
        return [] if hang is None else [str(self._saves.target), hang]

    def hear(self, ranks: Iterable[Sequence[str]]) -> None:
        """Take over the reports of other ranks about their parts of the save, for which the part of this rank waits."""
        hang = next((hang for target, hang in filter(None, ranks) if target == str(self._saves.target)), None)
        if self._saves.is_writing or (hang is None) == (self._saves.hang is None):
            return
        if hang is not None or self._has_heard:
            self._has_heard = hang is not None
            self._saves.report_hang(hang)

    def _tell_hang(self, seconds: float) -> None:
        stacks = {number: Stack(number) for number in self._saves.threads}
        # Threads that send files may have none left; the last one is that of the save itself.
        number = next((number for number, stack in stacks.items() if stack.file is not None), list(stacks)[-1])
        name = next((thread.name for thread in threading.enumerate() if thread.ident == number), "?")
        stack = stacks[number]
        doing = "" if stack.file is None else f" writes {stack.file} and"
        hang = (
            f"The save of {self._saves.target} hangs: for {seconds:.0f} s (hang_timeout={self._timeout:g}) it has made "
            f"no progress. The thread {name!r}{doing} is in {' ← '.join(stack.lines)}."
        )
        self._has_found = True
        if isinstance(self._saves.target, RemotePath):  # Python waits for threads that send files as it ends
            _logger.warning("%s The next save waits for it.", hang, main_process_only=False)
            return
        _logger.warning("%s Until it ends, no other checkpoint is saved.", hang, main_process_only=False)
        self._saves.report_hang(hang)
