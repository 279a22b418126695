"""This file is the history of a run as it is read: its curves and its events, from the lines that were written."""

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PLACES = ("step", "epoch", "samples", "seconds")
_CURVES = ("log", "evaluation")


@dataclass
class Curve:
    """The values of one name, and in which rows of the history they are.

    Args:
        rows: The rows.
        values: The values, one for each row; what is no number there is nan.
    """

    rows: Any = field(default_factory=lambda: array("q"))
    values: Any = field(default_factory=lambda: array("d"))


class History:
    """What a history file says, read further as it grows.

    Args:
        file: The file, as `JsonlLog` writes it; it may not be there yet.

    Attributes:
        curves: By name, what was logged and evaluated.
        evaluations: The lines of evaluations.
        events: The other lines.
        last: The line written last.
        heard: When that was, as `time.time` counts.
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
        self._rows = self._read = self._inode = 0

    def read(self) -> "History":
        """Take up the lines that came since the last time, and return this."""
        try:
            there = self.file.stat()
        except OSError:
            return self
        self.heard = there.st_mtime
        if there.st_ino != self._inode or there.st_size < self._read:  # a run that goes on writes a new file
            self._begin()
            self._inode = there.st_ino
        with self.file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._read += len(line)
                self._take(line)
        return self

    def places(self, rows: Any) -> dict[str, Any]:
        """Return where the run stood at some rows: the steps, epochs, samples and seconds."""
        return {name: np.asarray(values)[rows] for name, values in self._places.items()}

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            event, step = entry["event"], float(entry["step"])
        except (ValueError, TypeError, KeyError):  # not a line of ours
            return
        self.last = entry
        if event not in _CURVES:
            self.events.append(entry)
            return
        if event == "evaluation":
            self.evaluations.append(entry)
        places = self._places
        places["step"].append(step)
        for name in PLACES[1:]:
            places[name].append(number_of(entry.get(name), np.nan))
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


_NO_CURVES = frozenset((*PLACES, "event", "time"))
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")  # as JsonlLog writes them


def number_of(value: Any, otherwise: Any) -> Any:
    """Return a value as a number, or something else if it is none."""
    if isinstance(value, (int, float)):  # a truth too: 0 or 1
        return float(value)
    return float(value) if value in _NO_NUMBERS else otherwise


def numbers_in(entry: Mapping[str, Any], but: Iterable[str] = _NO_CURVES) -> dict[str, float]:
    """Return the numbers of a line by name, without where it stands."""
    found = {name: number_of(value, None) for name, value in entry.items() if name not in but}
    return {name: value for name, value in found.items() if value is not None}
