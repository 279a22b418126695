"""A summary of each run in a folder, from its run file and a few lines of its history."""

import json
import mmap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.runs.run_folder import recorded_checkpoint
from trainer_lib.runs.run_history import number_of
from trainer_lib.runs.run_status import facts_of, history_file, run_folders, standing

_LOSSES = 60  # points of a sparkline


@dataclass
class RunSummary:
    """A summary of a run.

    Args:
        path: The run's folder.
        status: The run's status, see `standing`.
        created: When the run started, in seconds since 1970.
        step: The number of updates so far.
        max_steps: The total number of updates, if known.
        seconds: The training time in seconds.
        best: The best evaluation: its metric, value and step.
        losses: A sample of the training losses over the whole run, ending with the last one.
        checkpoint: The folder of the last checkpoint, if it still exists.
        saved: When the last checkpoint was saved.
        heard: When the run last wrote a line.
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


def list_runs(folder: AnyPath) -> list[RunSummary]:
    """Return the runs in a folder and its subfolders, or the run of this folder; the newest last."""
    return sorted((summarize_run(path) for path in run_folders(folder)), key=lambda run: (run.created, str(run.path)))


def name_of(run: AnyPath, folder: AnyPath) -> str:
    """Return the name of a run in a list of those in a folder."""
    return run.resolve().name if run == folder else str(run).removeprefix(f"{folder}/")


def summarize_run(folder: AnyPath) -> RunSummary:
    """Return the summary of a run."""
    facts, file = facts_of(folder), history_file(folder)
    history = _history(file)
    last = {} if history is None else history.last()
    begun = {} if history is None else history.newest("started", "resumed")
    heard = float(last.get("time") or facts.get("created") or time.time())
    save = {} if history is None else history.newest("save")
    best = {} if history is None else history.newest("best")
    state: Mapping[str, Any] = facts.get("state") or {}
    summary = RunSummary(
        path=folder,
        status=standing(facts, last, heard),
        created=float(facts.get("created") or begun.get("time") or heard),
        step=last.get("step", state.get("step")),
        max_steps=begun.get("max_steps"),
        seconds=last.get("seconds", state.get("seconds")),
        best={name: best.get(name) for name in ("metric", "value", "step")} if best else state.get("best"),
        losses=[] if history is None else history.losses(),
        heard=heard,
    )
    if save and (checkpoint := recorded_checkpoint(folder, str(save.get("path")))).is_dir():
        summary.checkpoint, summary.saved = str(checkpoint), save.get("time")
    return summary


def _history(file: Path) -> "_History | None":
    """Return the history of a run, if it has one that can be read: the list of runs works without it."""
    try:
        return _History(file) if file.is_file() and file.stat().st_size else None
    except OSError:
        return None


class _History:
    """Selected lines of a history, without reading the whole file."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._text = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def last(self) -> dict[str, Any]:
        """Return the last complete line."""
        end = self._text.rfind(b"\n")
        while end > 0:
            begin = self._text.rfind(b"\n", 0, end) + 1
            if entry := _entry(self._text[begin:end]):
                return entry
            end = begin - 1
        return {}

    def newest(self, *events: str) -> dict[str, Any]:
        """Return the last line with one of these events."""
        begin = max(self._text.rfind(b'{"event": "%s"' % event.encode()) for event in events)
        if begin < 0:
            return {}
        end = self._text.find(b"\n", begin)
        return _entry(self._text[begin:end]) if end >= 0 else {}

    def losses(self) -> list[float]:
        """Return losses sampled at even distances in the file."""
        size = len(self._text)
        offsets = [size * index // _LOSSES for index in range(_LOSSES)]
        losses = dict(pair for offset in offsets if (pair := next(self._losses_from(offset), None)) is not None)
        if (newest := next(self._losses_before(size), None)) is not None:
            losses.update([newest])
        return list(losses.values())

    def _losses_from(self, offset: int) -> Iterator[tuple[int, float]]:
        begin = self._text.find(b'{"event": "log"', offset)
        while begin >= 0:
            end = self._text.find(b"\n", begin)
            if (loss := _loss(_entry(self._text[begin:end]))) is not None:
                yield begin, loss
            begin = self._text.find(b'{"event": "log"', end) if end >= 0 else -1

    def _losses_before(self, offset: int) -> Iterator[tuple[int, float]]:
        begin = self._text.rfind(b'{"event": "log"', 0, offset)
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
