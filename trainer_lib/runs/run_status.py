"""The status of a run: running, ended, died or silent."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.runs.run_environment import is_alive
from trainer_lib.runs.run_file import read_facts
from trainer_lib.runs.run_folder import EVALUATIONS_FILE, HISTORY_FILE, RUN_FILE, RunFolder

_LEVELS = 4  # such as outputs/DATE/TIME/RUN_ID
_SILENT_AFTER = 600.0  # seconds without a line, for processes on other machines


_Folder = TypeVar("_Folder", bound=AnyPath)


def is_run(folder: AnyPath) -> bool:
    """Whether a folder belongs to a run."""
    return (folder / RUN_FILE).is_file() or (folder / HISTORY_FILE).is_file()


def run_folders(folder: _Folder) -> list[_Folder]:
    """Return the folders of the runs in a folder, down to its fourth level; the folder itself if it is a run's."""
    found: list[Any] = [folder] if is_run(folder) else []
    level: list[Any] = [folder]
    for _ in range(_LEVELS):
        # Below a run there are its checkpoints.
        level = [path for parent in level if parent not in found for path in parent.glob("*/") if path.is_dir()]
        found += [path for path in level if is_run(path)]
    return found


def history_file(folder: AnyPath) -> Path:
    """Return the history file of a run, with its evaluations beside it; for a URL current local copies."""
    run = RunFolder(folder)
    run.download(HISTORY_FILE)
    run.download(EVALUATIONS_FILE)
    return run.history_file


def facts_of(folder: AnyPath) -> dict[str, Any]:
    """Return the facts of the run file, or an empty dict if it cannot be read: monitoring works without it."""
    try:
        return read_facts(folder / RUN_FILE)
    except (OSError, CheckpointError):
        return {}


def standing(facts: Mapping[str, Any], last: Mapping[str, Any], heard: float) -> str:
    """Return the status of a run.

    Args:
        facts: The contents of the run file.
        last: The last line of the history.
        heard: When that line was written, in seconds since 1970.

    Returns:
        "finished", "stopped", "interrupted" or "failed", as the run recorded; "running"; "died" if its process was
        killed; "silent" if its process is on another machine and has written nothing for ten minutes.
    """
    status = str(facts.get("status") or last.get("status") or "running")
    if status not in ("running", "new"):
        return status
    alive = is_alive(facts["process"]) if isinstance(facts.get("process"), Mapping) else None
    if alive is False:
        return "died"
    return "running" if alive or time.time() - heard < _SILENT_AFTER else "silent"
