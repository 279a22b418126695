"""Reader of a run's history: curves, evaluations and events, with what `trainer-lib evaluate` measured beside it."""

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.runs.run_folder import EVALUATIONS_FILE

PLACES = ("step", "epoch", "samples", "seconds")
_CURVES = ("log", "evaluation")


@dataclass(repr=False, eq=False)
class Curve(LightDataclass):
    """The values of one metric, with their rows in the history.

    Args:
        rows: The rows.
        values: One value per row; nan for values that are not numbers.
    """

    rows: Any = field(default_factory=lambda: array("q"))
    values: Any = field(default_factory=lambda: array("d"))


class History:
    """The contents of a history file, read incrementally as it grows.

    Args:
        file: The file written by `JsonlLog`; it may not exist yet. Evaluations beside it are read too.

    Attributes:
        curves: Logged and evaluated values, by name.
        evaluations: The lines of evaluations.
        events: The other lines.
        last: The last line of the run itself.
        heard: When the file was last written, in seconds since 1970.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.heard = 0.0
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self._places = {name: array("d") for name in PLACES}
        self._rows = 0
        self._files = [_GrowingFile(file) for file in (self.file, self.file.with_name(EVALUATIONS_FILE))]

    def read(self) -> "History":
        """Read the lines added since the last call, and return this object."""
        if any(file.is_replaced for file in self._files):
            self._begin()
        run_lines, evaluations = self._files
        for line in run_lines.new_lines():
            if entry := _entry(line):
                self.last: dict[str, Any] = entry
                self._take(entry)
        for line in evaluations.new_lines():
            if entry := _entry(line):
                self._take(entry)
        self.heard: float = run_lines.written
        return self

    def places(self, rows: Any) -> dict[str, Any]:
        """Return the steps, epochs, samples and seconds of some rows."""
        import numpy as np

        return {name: np.asarray(values)[rows] for name, values in self._places.items()}

    def _take(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event not in _CURVES:
            self.events.append(entry)
            return
        if event == "evaluation":
            self.evaluations.append(entry)
        places = self._places
        places["step"].append(float(entry["step"]))
        for name in PLACES[1:]:
            places[name].append(number_of(entry.get(name), math.nan))
        for name, value in entry.items():
            if name in _NO_CURVES:
                continue
            if type(value) is not float:
                value = number_of(value, None)
                if value is None:
                    continue
            curve = self.curves.get(name)
            if curve is None:
                curve = self.curves[name] = Curve()
            curve.rows.append(self._rows)
            curve.values.append(value)
        self._rows += 1


class _GrowingFile:
    """The lines of a file to which another program appends.

    Args:
        path: The file; it may not exist yet.

    Attributes:
        written: When the file was last written, in seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._inode = path, 0, 0
        self.written = 0.0

    @property
    def is_replaced(self) -> bool:
        """Whether the lines read so far are no longer those of the file: a resumed run writes a new one."""
        status = self._status()
        return status is not None and (self._inode not in (0, status.st_ino) or status.st_size < self._read)

    def new_lines(self) -> Iterator[bytes]:
        """Return the complete lines that were added since the last call."""
        status = self._status()
        if status is None:
            return
        self._inode, self.written = status.st_ino, status.st_mtime
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._read += len(line)
                yield line

    def _status(self) -> os.stat_result | None:
        try:
            return self._path.stat()
        except OSError:
            return None


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; `None` for anything but a line of a history."""
    try:
        entry = json.loads(line)
        _ = entry["event"], float(entry["step"])
        return entry
    except (ValueError, TypeError, KeyError):
        return None


_NO_CURVES = frozenset((*PLACES, "event", "time"))
_NONFINITE = ("NaN", "Infinity", "-Infinity")  # as JsonlLog writes them


def number_of(value: Any, otherwise: Any) -> Any:
    """Return a value as a number, or `otherwise` if it is not a number."""
    if isinstance(value, (int, float)):  # includes bool
        return float(value)
    return float(value) if value in _NONFINITE else otherwise


def numbers_in(entry: Mapping[str, Any], but: Iterable[str] = _NO_CURVES) -> dict[str, float]:
    """Return the metrics of a line by name, without step, epoch, samples and seconds."""
    numbers = {name: number_of(value, None) for name, value in entry.items() if name not in but}
    return {name: value for name, value in numbers.items() if value is not None}
