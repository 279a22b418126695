"""This file is sending what a tracker did not take while a run lasted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.entries import HandOver, from_line
from trainer_lib.tracking.delivery.spool import read_spool
from trainer_lib.tracking.registry import tracker_class
from trainer_lib.tracking.secrets import MASK

_AT_ONCE = 500
_NO_STEP = 2**62  # behind all steps, so that nothing there is taken back


@dataclass(frozen=True)
class Waiting:
    """What waits for one tracker.

    Attributes:
        path: The file.
        tracker: The tracker's name.
        project: What the run belongs to there.
        header: What the file says about how to make it.
        lines: What waits.
    """

    path: Path
    tracker: str
    project: str
    header: dict[str, Any]
    lines: list[str]


def find(place: Path) -> list[Waiting]:
    """Return what waits in a file, a folder of such files, or the folder of a run.

    Raises:
        ConfigurationError: If there is no such place.
    """
    if not place.exists():
        raise ConfigurationError(f"{place} is not there. Give the folder of a run.")
    if place.is_file():
        files = [place]
    else:
        folder = place / "spool" if (place / "spool").is_dir() else place
        files = sorted(file for file in folder.glob("*.jsonl") if _is_spool(file))
    found: list[Waiting] = []
    for file in files:
        header, lines = read_spool(file)
        found.append(Waiting(file, header["tracker"], header["project"], header, lines))
    return found


def send(waiting: Waiting, told: Callable[[int], None] = lambda count: None) -> int:
    """Send what waits, into the run that it is of, and delete the file; how many entries that were.

    Args:
        waiting: What waits.
        told: Is called with how many are through.
    """
    tracker = _made(waiting)
    tracker.start()
    for start in range(0, len(waiting.lines), _AT_ONCE):
        entries = [from_line(line) for line in waiting.lines[start : start + _AT_ONCE]]
        HandOver(tracker, entries).make()
        told(start + len(entries))
    tracker.finish()
    waiting.path.unlink()
    return len(waiting.lines)


def _made(waiting: Waiting) -> GeneralTracker:
    kind: Any = tracker_class(waiting.tracker)
    header = waiting.header
    # Of secrets nothing was written down: they come from the environment, as in the run.
    options = {name: value for name, value in header["options"].items() if value != MASK}
    arguments = [waiting.project]
    if getattr(kind, "requires_logging_directory", False):
        arguments.append(header["folder"])
    if issubclass(kind, BuiltInTracker):
        kind.check(waiting.project, **options)
        options = kind.continuing(header["token"], _NO_STEP) | options
        environment.set_variables(environment.with_defaults(kind.environment))
    make: Any = kind
    return make(*arguments, **options)


def _is_spool(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as opened:
        return '"trainer_lib.spool"' in opened.readline()
