"""Undelivered tracker entries, in a file, or in memory without a folder."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.atomic_files import ESCAPED, append_text, replace_file
from trainer_lib.foundation.errors import StateError
from trainer_lib.logging import get_logger
from trainer_lib.tracking.delivery.entries import Entry, from_line, to_line

_logger = get_logger(__name__)

_MEMORY_LIMIT = 10_000


class Spool:
    """Undelivered entries, in order.

    Args:
        path: The file, which exists while it holds entries; `None` keeps a limited number in memory.
        header: The file's first line: the facts that another program needs to send the entries.
    """

    lost: int

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self._header = path, dict(header)
        self._lines: list[str] = []  # undelivered entries
        self._lock = threading.Lock()
        self.lost = 0
        self._is_written = False  # whether the file holds them, but for the newest that a full disk did not take
        self._is_behind = False  # whether it lacks those
        if path is not None and path.is_file() and path.stat().st_size:  # an empty file is left by a kill
            self._take_over(path)

    def __len__(self) -> int:
        return sum(1 for line in self._lines if _is_point(line))

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries."""
        return not self._lines

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries."""
        lines: list[str] = []
        for entry in entries:
            line = to_line(entry)
            if line is None:
                self.lost += 1
            else:
                lines.append(line)
        with self._lock:
            self._lines += lines
            if self.path is not None and lines:
                try:
                    self._append(self.path, lines)
                    return
                except OSError:  # a full disk: continue in memory
                    self._is_behind = True
            excess = max(0, len(self._lines) - _MEMORY_LIMIT) if self._is_behind or self.path is None else 0
            self.lost += excess
            del self._lines[:excess]

    def first(self, count: int) -> list[Entry]:
        """Return the oldest entries."""
        with self._lock:
            return [from_line(line) for line in self._lines[:count]]

    def drop(self, count: int) -> None:
        """Remove the oldest entries, which were delivered."""
        with self._lock:
            del self._lines[:count]
            if not self._lines and self.path is not None and self._is_written:
                self.path.unlink(missing_ok=True)
                self._is_written = self._is_behind = False

    def close(self) -> None:
        """Rewrite the file with the undelivered entries only."""
        with self._lock:
            if self.path is None or not (self._is_written or self._lines):
                return
            try:
                self._rewrite(self.path)
            except OSError:  # if it holds delivered entries, these are sent twice, which is harmless
                if self._is_behind:
                    self.path = None

    def _append(self, path: Path, lines: list[str]) -> None:
        if self._is_written and not self._is_behind:
            append_text(path, "".join(f"{line}\n" for line in lines))
        else:
            self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        if not self._is_written:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path = path = _claim(path)  # another tracker of this name may have created it
        try:
            replace_file(path, self._write)
        except OSError:
            if not self._is_written:
                path.unlink(missing_ok=True)
            raise
        self._is_written, self._is_behind = True, False

    def _write(self, path: Path) -> None:
        text = "".join(f"{line}\n" for line in [json.dumps(self._header), *self._lines])
        path.write_text(text, encoding="utf-8", errors=ESCAPED)

    def _take_over(self, path: Path) -> None:
        """Load the entries of an earlier program if they belong to this run; otherwise use another file name."""
        header: dict[str, Any] = {}
        try:
            header, lines = read_spool(path)
        except (OSError, StateError) as error:  # the tracker still gets the values of this program
            _logger.warning("Undelivered tracker values of an earlier program cannot be read. %s", error)
        else:
            if header.get("token") == self._header.get("token"):
                self._lines, self._is_written = lines, True
                try:
                    replace_file(path, self._write)
                except OSError:  # the next line is not appended to one that a kill has cut
                    self._is_behind = True
                return
        self.path = next(name for name in _names(path) if not name.exists())


def read_spool(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a spool's header and its complete lines.

    Raises:
        StateError: If the file is not a spool file.
    """
    # JSON escapes no line separators of Unicode, at which `splitlines` would cut a line too.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        header = json.loads(lines[0])
        if header["format"] != "trainer_lib.spool":
            raise KeyError("format")
    except (ValueError, LookupError, TypeError) as error:
        raise StateError(
            f"{path} is not a spool file of undelivered tracker values: its first line must be the spool's header."
        ) from error
    return header, [line for line in lines[1:] if _is_whole(line)]


def _names(path: Path) -> Iterator[Path]:
    yield path
    stem = path.stem
    yield from (path.with_name(f"{stem}-{number}.jsonl") for number in itertools.count(2))


def _claim(path: Path) -> Path:
    """Create the first file name that is free, and return it."""
    names = _names(path)
    while True:
        name = next(names)
        with contextlib.suppress(FileExistsError):
            name.touch(exist_ok=False)
            return name


def _is_whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_point(line: str) -> bool:
    return line.startswith('{"kind": "log"')
