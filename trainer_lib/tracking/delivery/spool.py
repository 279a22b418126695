"""This file is what a tracker did not take yet: lines in a file, or in memory where there is no folder."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation.errors import StateError
from trainer_lib.tracking.delivery.entries import Entry, from_line, to_line

_IN_MEMORY = 10_000


class Spool:
    """Entries that wait, in the order they came.

    Args:
        path: The file, which is there as long as something waits; `None` keeps them in memory, up to a number.
        header: What is needed to send them from another program: the file's first line.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self._header = path, dict(header)
        self._lines: list[str] = []  # those that wait
        self._lock = threading.Lock()
        self.lost = 0
        self._is_written = False  # whether the file has them
        if path is not None and path.is_file() and path.stat().st_size:  # else a kill left it before its first line
            self._take_over(path)

    def __len__(self) -> int:
        return sum(1 for line in self._lines if _is_point(line))

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines

    def add(self, entries: Iterable[Entry]) -> None:
        """Keep entries."""
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
                except OSError:  # a full disk: memory is what is left
                    self.path = None
            excess = max(0, len(self._lines) - _IN_MEMORY) if self.path is None else 0
            self.lost += excess
            del self._lines[:excess]

    def first(self, count: int) -> list[Entry]:
        """Return the entries that wait longest."""
        with self._lock:
            return [from_line(line) for line in self._lines[:count]]

    def drop(self, count: int) -> None:
        """Forget those that wait longest: they have arrived."""
        with self._lock:
            del self._lines[:count]
            if not self._lines and self.path is not None and self._is_written:
                self.path.unlink(missing_ok=True)
                self._is_written = False

    def close(self) -> None:
        """Leave what waits, and nothing else, in the file."""
        with self._lock:
            if self.path is not None and self._is_written:
                with contextlib.suppress(OSError):  # then what has arrived is sent again, which does no harm
                    replace_file(self.path, self._write)

    def _append(self, path: Path, lines: list[str]) -> None:
        if self._is_written:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = _claimed(path)  # another tracker of this name may have taken it meanwhile
        self._write(self.path)
        self._is_written = True

    def _write(self, path: Path) -> None:
        text = "".join(f"{line}\n" for line in [json.dumps(self._header), *self._lines])
        path.write_text(text, encoding="utf-8")

    def _take_over(self, path: Path) -> None:
        """Go on with what an earlier program left, if it is of the same run; else leave it, and take another name."""
        header, lines = read_spool(path)
        if header.get("token") == self._header.get("token"):
            self._lines, self._is_written = lines, True
            return
        self.path = next(other for other in _names(path) if not other.exists())


def read_spool(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a spool's header, and its lines; one that was cut off by the end of a program is left out.

    Raises:
        StateError: If it is no such file.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        header = json.loads(lines[0])
        if header["format"] != "trainer_lib.spool":
            raise KeyError("format")
    except (ValueError, LookupError, TypeError) as error:
        raise StateError(
            f"{path} is no file of what a tracker did not take: its first line says so of others."
        ) from error
    return header, [line for line in lines[1:] if _is_whole(line)]


def _names(path: Path) -> Iterator[Path]:
    yield path
    stem = path.stem
    yield from (path.with_name(f"{stem}-{number}.jsonl") for number in itertools.count(2))


def _claimed(path: Path) -> Path:
    """Return the first of the names that is free, and take it."""
    names = _names(path)
    while True:
        one = next(names)
        with contextlib.suppress(FileExistsError):
            one.touch(exist_ok=False)
            return one


def _is_whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_point(line: str) -> bool:
    return line.startswith('{"kind": "log"')
