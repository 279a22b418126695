"""Replay of spooled values into a tracker, after the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.entries import EntryCalls, from_line
from trainer_lib.tracking.delivery.spool import read_spool
from trainer_lib.tracking.registry import tracker_class
from trainer_lib.tracking.secrets import MASK

_AT_ONCE = 500
_NO_STEP = 2**62  # beyond all steps, so that the tracker removes nothing


@frozen_dataclass
class SpooledRun:
    """The undelivered values of one tracker.

    Attributes:
        path: The spool file.
        tracker: The tracker's name.
        project: The project of the run.
        header: The file's header, with the tracker's options.
        lines: The undelivered entries.
    """

    path: Path
    tracker: str
    project: str
    header: dict[str, Any]
    lines: list[str]


def find(path: Path) -> list[SpooledRun]:
    """Return the undelivered values in a spool file, a folder of spool files, or the folder of a run.

    Raises:
        ConfigurationError: If the path does not exist.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist. Give the folder of a run.")
    if path.is_file():
        files = [path]
    else:
        folder = path / "spool" if (path / "spool").is_dir() else path
        files = sorted(file for file in folder.glob("*.jsonl") if _is_spool(file))
    spooled: list[SpooledRun] = []
    for file in files:
        header, lines = read_spool(file)
        spooled.append(SpooledRun(file, header["tracker"], header["project"], header, lines))
    return spooled


def send(spooled: SpooledRun, report: Callable[[int], None] = lambda count: None) -> int:
    """Send undelivered values into their run, and delete the file; return the number of entries.

    After an error the file keeps what the tracker has not accepted.

    Args:
        spooled: The undelivered values.
        report: Called with the number of entries sent so far.
    """
    tracker = _make_tracker(spooled)
    tracker.start()
    for start in range(0, len(spooled.lines), _AT_ONCE):
        calls = EntryCalls(tracker, [from_line(line) for line in spooled.lines[start : start + _AT_ONCE]])
        try:
            calls.make()
        except BaseException:  # Ctrl-C too
            _keep(spooled, start + calls.done)
            raise
        report(start + calls.done)
    tracker.finish()
    spooled.path.unlink()
    return len(spooled.lines)


def _keep(spooled: SpooledRun, sent: int) -> None:
    text = "".join(f"{line}\n" for line in [json.dumps(spooled.header), *spooled.lines[sent:]])
    replace_file(spooled.path, lambda path: path.write_text(text, encoding="utf-8"))


def _make_tracker(spooled: SpooledRun) -> GeneralTracker:
    kind: Any = tracker_class(spooled.tracker)
    header = spooled.header
    # Secrets are not in the file: they come from the environment, as in the run.
    options = {name: value for name, value in header["options"].items() if value != MASK}
    arguments = [spooled.project]
    if getattr(kind, "requires_logging_directory", False):
        arguments.append(header["folder"])
    if issubclass(kind, BuiltInTracker):
        kind.check(spooled.project, **options)
        options = kind.continuing(header["token"], _NO_STEP) | options
        environment.set_variables(environment.with_defaults(kind.environment))
    make: Any = kind
    return make(*arguments, **options)


def _is_spool(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as opened:
        return '"trainer_lib.spool"' in opened.readline()
