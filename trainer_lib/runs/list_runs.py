"""This file is runs at a glance: how each stands, from its file and a few lines of its history."""

import json
import mmap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.runs.run_history import number_of
from trainer_lib.runs.run_status import facts_of, history_file, is_run, standing

_LOSSES = 60  # that a curve is drawn from


@dataclass
class Glance:
    """A run at a glance.

    Args:
        path: Its folder.
        status: How it stands, as `standing` says.
        created: When it began, as `time.time` counts.
        step: How many updates it made.
        max_steps: Out of how many, if that is known.
        seconds: How long it trained.
        best: The best evaluation: its metric, value and step.
        losses: Some of its training losses, over the whole run; the last one is the last.
        checkpoint: The folder saved last, if it is still there.
        saved: When that was.
        heard: When the run last wrote something.
    """

    path: AnyPath
    status: str
    created: float
    step: int | None = None
    max_steps: int | None = None
    seconds: float | None = None
    best: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list[float])
    checkpoint: str | None = None
    saved: float | None = None
    heard: float = 0.0


def list_runs(folder: AnyPath) -> list[Glance]:
    """Return the runs in a folder and in the folders in it, or the one whose folder it is; the newest last."""
    if is_run(folder):
        found = [folder]
    else:
        found = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_dir() and is_run(path)]
    return sorted((glance(path) for path in found), key=lambda one: (one.created, str(one.path)))


def glance(folder: AnyPath) -> Glance:
    """Return how a run stands."""
    facts, history = facts_of(folder), history_file(folder)
    told = _History(history) if history.is_file() and history.stat().st_size else None
    last = {} if told is None else told.last()
    begun = {} if told is None else told.newest("started", "resumed")
    heard = float(last.get("time") or facts.get("created") or time.time())
    save = {} if told is None else told.newest("save")
    best = {} if told is None else told.newest("best")
    state: Mapping[str, Any] = facts.get("state") or {}
    found = Glance(
        path=folder,
        status=standing(facts, last, heard),
        created=float(facts.get("created") or begun.get("time") or heard),
        step=last.get("step", state.get("step")),
        max_steps=begun.get("max_steps"),
        seconds=last.get("seconds", state.get("seconds")),
        best={name: best.get(name) for name in ("metric", "value", "step")} if best else state.get("best"),
        losses=[] if told is None else told.losses(),
        heard=heard,
    )
    if save and path_at(str(save.get("path"))).is_dir():
        found.checkpoint, found.saved = str(save["path"]), save.get("time")
    return found


class _History:
    """Lines of a history, found without reading all of it."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._text = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def last(self) -> dict[str, Any]:
        """Return the last line that is whole."""
        end = self._text.rfind(b"\n")
        while end > 0:
            begin = self._text.rfind(b"\n", 0, end) + 1
            if entry := _entry(self._text[begin:end]):
                return entry
            end = begin - 1
        return {}

    def newest(self, *events: str) -> dict[str, Any]:
        """Return the last line of some kinds of events."""
        begin = max(self._text.rfind(b'{"event": "%s"' % event.encode()) for event in events)
        if begin < 0:
            return {}
        end = self._text.find(b"\n", begin)
        return _entry(self._text[begin:end]) if end >= 0 else {}

    def losses(self) -> list[float]:
        """Return losses from places that are evenly far apart."""
        size = len(self._text)
        places = [size * index // _LOSSES for index in range(_LOSSES)]
        found = dict(one for place in places if (one := next(self._losses_from(place), None)) is not None)
        if (newest := next(self._losses_before(size), None)) is not None:
            found.update([newest])
        return list(found.values())

    def _losses_from(self, place: int) -> Iterator[tuple[int, float]]:
        begin = self._text.find(b'{"event": "log"', place)
        while begin >= 0:
            end = self._text.find(b"\n", begin)
            if (loss := _loss(_entry(self._text[begin:end]))) is not None:
                yield begin, loss
            begin = self._text.find(b'{"event": "log"', end) if end >= 0 else -1

    def _losses_before(self, place: int) -> Iterator[tuple[int, float]]:
        begin = self._text.rfind(b'{"event": "log"', 0, place)
        while begin >= 0:
            end = self._text.find(b"\n", begin)
            if end >= 0 and (loss := _loss(_entry(self._text[begin:end]))) is not None:
                yield begin, loss
            begin = self._text.rfind(b'{"event": "log"', 0, begin)


def _loss(entry: Mapping[str, Any]) -> float | None:
    return number_of(entry.get("loss"), None)


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) and "event" in entry and "step" in entry else {}
