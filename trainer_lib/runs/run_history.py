"""Reader of a run's history: curves, evaluations and events."""

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.foundation.light_dataclasses import LightDataclass

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
        file: The file written by `JsonlLog`; it may not exist yet.

    Attributes:
        curves: Logged and evaluated values, by name.
        evaluations: The lines of evaluations.
        events: The other lines.
        last: The last line.
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
        self._rows = self._read = self._inode = 0

    def read(self) -> "History":
        """Read the lines added since the last call, and return this object."""
        try:
            status = self.file.stat()
        except OSError:
            return self
        self.heard: float = status.st_mtime
        if status.st_ino != self._inode or status.st_size < self._read:  # a resumed run writes a new file
            self._begin()
            self._inode = status.st_ino
        with self.file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._read += len(line)
                self._take(line)
        return self

    def places(self, rows: Any) -> dict[str, Any]:
        """Return the steps, epochs, samples and seconds of some rows."""
        import numpy as np

        return {name: np.asarray(values)[rows] for name, values in self._places.items()}

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            event, step = entry["event"], float(entry["step"])
        except (ValueError, TypeError, KeyError):  # not a history line
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
