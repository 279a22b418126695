"""This file is how a run stands: it runs, it ended, or whoever trained it is gone without a word."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.runs.run_environment import is_alive
from trainer_lib.runs.run_file import read_facts
from trainer_lib.runs.run_folder import HISTORY_FILE, RUN_FILE, RunFolder

_SILENT_AFTER = 600.0  # seconds without a line, of a process that cannot be asked


def is_run(folder: AnyPath) -> bool:
    """Whether a folder is that of a run."""
    return (folder / RUN_FILE).is_file() or (folder / HISTORY_FILE).is_file()


def history_file(folder: AnyPath) -> Path:
    """Return the history of a run; of one behind a URL a copy on this machine, as it is now."""
    run = RunFolder(folder)
    run.download(HISTORY_FILE)
    return run.history_file


def facts_of(folder: AnyPath) -> dict[str, Any]:
    """Return what a run's file says; nothing if it cannot be read, since looking on must not need it."""
    try:
        return read_facts(folder / RUN_FILE)
    except (OSError, CheckpointError):
        return {}


def standing(facts: Mapping[str, Any], last: Mapping[str, Any], heard: float) -> str:
    """Return how a run stands.

    Args:
        facts: What its file says.
        last: The last line of its history.
        heard: When that was written, as `time.time` counts.

    Returns:
        "finished", "stopped", "interrupted" or "failed", as the run itself says; "running"; "died" if its process is
        gone without having said anything, and "silent" if that cannot be asked and wrote nothing for ten minutes.
    """
    status = str(facts.get("status") or last.get("status") or "running")
    if status not in ("running", "new"):
        return status
    alive = is_alive(facts["process"]) if isinstance(facts.get("process"), Mapping) else None
    if alive is False:
        return "died"
    return "running" if alive or time.time() - heard < _SILENT_AFTER else "silent"
