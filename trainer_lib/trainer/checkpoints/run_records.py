"""The description and the report in a run's folder."""

import sys
from typing import TYPE_CHECKING, Any

from trainer_lib.events import Run
from trainer_lib.foundation.errors import UnreachableError, UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.runs import RunFolder

if TYPE_CHECKING:
    from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

_logger = get_logger(__name__)


def describe_run(args: "TrainingArguments") -> dict[str, Any]:
    """Return the arguments, the environment and the process of a run, without the secrets among them."""
    from trainer_lib.runs.run_environment import describe_environment, describe_process, script_commit
    from trainer_lib.tracking.secrets import masked, masked_command

    environment = {**describe_environment(), "command": masked_command(sys.argv)}
    # Not on a thread: a data worker that is forked meanwhile holds git's pipes open, and the thread waits for its end.
    if (commit := script_commit()) is not None:
        environment["commit"] = commit
    return {
        "arguments": masked(args.to_dict(unwritable="leave out")),
        "environment": environment,
        "process": describe_process(),
    }


def write_running(folder: RunFolder, args: "TrainingArguments", is_new: bool) -> None:
    """Write the description of a run that begins or resumes.

    Raises:
        UnwritableError: If the run is new and the folder cannot be written: nobody would find the run.
    """
    try:
        folder.write(status="running", **describe_run(args))
    except OSError as error:
        if is_new:
            raise UnwritableError(f"{folder.path} could not be written: {error.strerror or error}.") from error
        _logger.warning('The status "running" could not be written to %s: %s.', folder.path, error)


def write_end(folder: RunFolder, run: Run) -> None:
    """Write how a run ended, and its report; a failure is logged, since the weights are there all the same.

    The report comes first: a run that is killed before is not finished, and writes both when it resumes.
    """
    folder.facts |= {"status": run.state.status, "state": run.state.state_dict(), "metrics": dict(run.metrics)}
    write_report(folder)
    try:
        folder.write()
    except (OSError, UnreachableError) as error:
        _logger.warning("How the run ended could not be written to %s: %s.", folder.path, error)


def write_report(folder: RunFolder) -> None:
    """Write the report of a run into its folder, if it has a history. A failure is logged, and the run succeeds."""
    if not folder.history_file.is_file():
        return
    from trainer_lib.checkpointing.storage.storage import storage_of
    from trainer_lib.runs.report.report_data import Source, contents
    from trainer_lib.runs.report.report_page import REPORT_FILE, page
    from trainer_lib.runs.run_history import History

    try:
        run = Source(folder.run_id, str(folder.path), History(folder.history_file), lambda: folder.facts)
        storage_of(folder.path).write(REPORT_FILE, page(contents([run])).encode())
    except Exception as error:  # noqa: BLE001 - a report must not fail a run
        _logger.warning("The report of the run could not be written to %s: %s.", folder.path, error)


def report_of(folder: RunFolder) -> str | None:
    """Return the path of a run's report, if it has one."""
    from trainer_lib.runs.report.report_page import REPORT_FILE

    return str(folder.path / REPORT_FILE) if (folder.path / REPORT_FILE).is_file() else None
