"""This file is where a run stands before it begins: its folder, and the checkpoint that it goes on from."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.load.fallback import open_verified, set_aside
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.checkpointing.third_party.third_party import advice, library_of
from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import (
    ConfigurationError,
    DamagedError,
    UnreachableError,
    did_you_mean,
)
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.runs import CHECKPOINTS, RUN_FILE, FoundRun, RunFolder, find_runs, new_run, read_run
from trainer_lib.runs.run_lease import Lease
from trainer_lib.trainer.checkpoints.finished_runs import describe_other_runs, final_checkpoint, is_finished

_logger = get_logger(__name__)


def checkpoint_at(path: str | AnyPath) -> AnyPath:
    """Return the checkpoint that a path means: itself, or the newest of the run whose folder it is.

    Raises:
        ConfigurationError: If there is none.
    """
    folder = path_at(path).resolve()
    if is_committed(folder):
        return folder
    if (library := library_of(folder)) is not None:
        raise ConfigurationError(advice(folder, library))
    newest = read_run(folder, None).newest_checkpoint()
    if newest is None:
        raise ConfigurationError(
            f"resume={str(path)!r}: no checkpoint is there, nor in its folder {CHECKPOINTS}. Give a folder such as "
            f'output_dir/RUN_ID/{CHECKPOINTS}/checkpoint-00000100, the folder of a run, or "auto".'
            f"{did_you_mean(path, ('auto', 'extend', 'never'))}"
        )
    return newest


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands before it begins.

    Attributes:
        folder: Its folder; `None`: nothing is written.
        checkpoint: The checkpoint to resume from, or of a finished run the one to load; `None`: it begins.
        is_finished: It ended before, and there is nothing to train.
        is_new: Whether its folder is that of a new run, which nobody else knows.
        notes: What to warn of, once this is where the run stands.
    """

    folder: RunFolder | None
    checkpoint: AnyPath | None = None
    is_finished: bool = False
    is_new: bool = False
    notes: tuple[str, ...] = ()

    @property
    def needs_lease(self) -> bool:
        """Whether it is a run that is there, and is written to."""
        return self.folder is not None and not self.is_new and not self.is_finished


def find_resume_point(
    root: AnyPath | None, name: str | None, resume: str, group: ProcessGroup, what: Any
) -> tuple[ResumePoint, Lease]:
    """Return where a run stands, every byte of its checkpoint checked, and the lease of its folder.

    All processes get the same place; the first of them holds the lease.

    One that is damaged is renamed, and the one before it taken, unless it was named.

    Args:
        root: Where runs are kept.
        name: What the user calls the run.
        resume: "never", "auto", "extend", or the path of a checkpoint or of a run.
        group: The processes.
        what: What it trains.

    Raises:
        ConfigurationError: If what it is to go on from is not there.
        DamagedError: If it was named, and is damaged.
    """
    damage: list[str] = []
    with ExitStack() as on_error:
        lease = Lease(None)
        while True:
            place = run_on_main_process(group, "fit", partial(_look_for_run, root, name, resume, what))
            if place.folder is not None and place.needs_lease and place.folder.path != lease.folder:
                lease.release()
                lease = on_error.enter_context(_acquired_lease(place.folder, group))
                continue  # another program may have moved it on meanwhile
            if place.checkpoint is None:
                break
            try:
                open_verified(place.checkpoint, group, "fit", group.rank, group.size, is_loaded_next=True)
                break
            except DamagedError as error:
                if place.checkpoint == path_at(resume).resolve():
                    raise
                aside = set_aside(place.checkpoint, group, "fit", leads=group.rank == 0)
                damage.append(f"{error} It is now called {aside.name}.")
        on_error.pop_all()
    for note in place.notes:
        _logger.warning("%s", note)
    if damage:
        _logger.warning("%s Going on from %s.", " ".join(damage), place.checkpoint or "the beginning")
    if not place.needs_lease:  # a new run is leased when it begins, and its folder is made
        lease.release()
        lease = Lease(None if place.folder is None or place.is_finished else place.folder.path)
    elif group.rank == 0 and place.folder is not None:
        _delete_debris(place.folder.path / CHECKPOINTS)
    return place, lease


def _acquired_lease(folder: RunFolder, group: ProcessGroup) -> Lease:
    """Return the lease of a run that is there, held by the first process; or raise on all why it cannot be had."""
    lease = Lease(folder.path)
    run_on_main_process(group, "fit", lease.acquire)
    return lease


def _look_for_run(root: AnyPath | None, name: str | None, resume: str, what: Any) -> ResumePoint:
    checkpoint = None if resume in ("never", "auto", "extend") else checkpoint_at(resume)
    if root is None:
        if resume in ("auto", "extend"):
            raise ConfigurationError(f'resume="{resume}" looks for a run in output_dir. Give output_dir.')
        return ResumePoint(None, checkpoint)
    _check_writable(root)
    found = find_runs(root)
    number = 1 + max((candidate.run.facts.get("number", 0) for candidate in found), default=0)
    if checkpoint is not None:
        run = _continued(checkpoint, root, what)
        return ResumePoint(run or new_run(root, name, what, number), checkpoint, is_new=run is None)
    runs = [candidate.run for candidate in found if candidate.mismatch(what) is None]
    unfinished = [run for run in runs if not is_finished(run) and run.newest_checkpoint() is not None]
    notes: list[str | None] = []
    place = ResumePoint(new_run(root, name, what, number), is_new=True)
    if resume == "never":
        notes.append(_describe_unfinished(unfinished))
    elif runs and is_finished(runs[-1]) and resume == "extend":
        place = ResumePoint(runs[-1], _checkpoint_of_finished(runs[-1]))
    elif runs and is_finished(runs[-1]):
        place = ResumePoint(runs[-1], final_checkpoint(runs[-1]), is_finished=True)
        notes.append(_describe_finished(runs[-1], unfinished))
    elif unfinished:
        place = ResumePoint(unfinished[-1], unfinished[-1].newest_checkpoint())
        notes.append(_describe_rebuilt(found, unfinished[-1]))
    else:
        notes.append(describe_other_runs(found, what))
    return replace(place, notes=tuple(note for note in notes if note is not None))


def _describe_finished(run: RunFolder, unfinished: list[RunFolder]) -> str:
    older = f" An older run is not finished: resume={str(unfinished[-1].path)!r} continues it." if unfinished else ""
    return (
        f'The run {run.path} is finished: there is nothing to train. To train it further, give resume="extend" and '
        f'more steps or epochs; for a new run give resume="never".{older}'
    )


def _describe_unfinished(unfinished: list[RunFolder]) -> str | None:
    if not unfinished:
        return None
    return f'The run {unfinished[-1].path} is not finished. This is a new one; resume="auto" would resume that one.'


def _describe_rebuilt(found: list[FoundRun], run: RunFolder) -> str | None:
    """Return what to say where the file of the run to resume could not be used."""
    problem = next(candidate.problem for candidate in found if candidate.run is run)
    if problem is None:
        return None
    return (
        f"{run.path / RUN_FILE} could not be used: {problem}. What it said is taken from the run's newest checkpoint, "
        "and it is written again."
    )


def _continued(checkpoint: AnyPath, root: AnyPath, what: Any) -> RunFolder | None:
    """Return the run that goes on from a checkpoint, if it does not begin a new one."""
    folder = checkpoint.parent.parent
    if folder.parent != root.resolve():
        return None
    run = read_run(folder, what)
    if checkpoint == run.newest_checkpoint():
        return run
    # It would be two runs in one folder: the later checkpoints are of another training than the one to come.
    _logger.warning("%s is not the newest checkpoint of its run, which stays as it is: this is a new run.", checkpoint)
    return None


def _checkpoint_of_finished(run: RunFolder) -> AnyPath:
    newest = run.newest_checkpoint()
    if newest is None:
        raise ConfigurationError(
            f'resume="extend": the run {run.path} is finished and has no checkpoint to go on from. Give resume="never" '
            "for a new one."
        )
    return newest


def _check_writable(root: AnyPath) -> None:
    try:
        storage_of(root).check_writable()
    except (OSError, UnreachableError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ConfigurationError(
            f"output_dir={str(root)!r} cannot be written to: {reason}. Give a folder that can."
        ) from error


def _delete_debris(checkpoints: AnyPath) -> None:
    """Delete what saves of this run left that were cut short; what cannot be deleted is in nobody's way."""
    try:
        storage_of(checkpoints).delete_debris()
    except (OSError, UnreachableError) as error:
        _logger.warning("What is left of a save in %s could not be deleted: %s", checkpoints, error)
