"""The status of a run: running, ended, died or silent."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.runs.run_environment import is_alive
from trainer_lib.runs.run_file import read_facts
from trainer_lib.runs.run_folder import EVALUATIONS_FILE, HISTORY_FILE, RUN_FILE, RunFolder

_SILENT_AFTER = 600.0  # seconds without a line, for processes on other machines


def is_run(folder: AnyPath) -> bool:
    """Whether a folder belongs to a run."""
    return (folder / RUN_FILE).is_file() or (folder / HISTORY_FILE).is_file()


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
