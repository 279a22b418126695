"""Resuming a run: which folder and which checkpoint `fit` begins with."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import (
    ConfigurationError,
    DamagedError,
    UnreachableError,
    did_you_mean,
)
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.runs import CHECKPOINTS, RUN_FILE, FoundRun, RunFolder, find_runs, new_run, read_run
from trainer_lib.runs.run_lease import Lease, is_leased

_logger = get_logger(__name__)


def checkpoint_at(path: str | AnyPath, argument: str = "resume") -> AnyPath:
    """Return the checkpoint at a path (also of Hugging Face's Trainer), or the newest of the run whose folder it is.

    Args:
        path: The folder of a checkpoint or of a run.
        argument: The argument that gives it, for the error.

    Raises:
        ConfigurationError: If there is no checkpoint.
    """
    from trainer_lib.checkpointing.third_party.third_party import ACCELERATE, library_of

    folder = _resolved(path)
    library = library_of(folder)
    if library == ACCELERATE:
        raise ConfigurationError(
            f"{folder} was written by Accelerate, which records neither the steps nor the epochs of a run. Load it in "
            "a loop of yours (accelerator.load_state), or only its weights: load_checkpoint_in_model(model, folder)."
        )
    if isinstance(folder, Path) and folder.is_file():
        raise ConfigurationError(
            f"{argument}={str(path)!r} is a file, and a checkpoint is a folder. To start with the weights in a file: "
            "load_checkpoint_in_model(model, file), or model.load_state_dict(…), before the Trainer."
        )
    if is_committed(folder) or library is not None:
        return folder
    newest = read_run(folder, None).newest_checkpoint()
    if newest is None:
        runs, theirs = find_runs(folder), newest_of_transformers(folder)
        newest_here = runs[-1].run.path if runs else theirs
        raise ConfigurationError(
            f"{argument}={str(path)!r}: there is no checkpoint, nor one in its folder {CHECKPOINTS}. Give a folder "
            f"such as output_dir/RUN_ID/{CHECKPOINTS}/checkpoint-00000100, or the folder of a run"
            f"{f': the newest one here is {newest_here}' if newest_here else ''}."
            f"{did_you_mean(path, ('auto', 'extend', 'never')) if argument == 'resume' else ''}"
        )
    return newest


def _resolved(path: str | AnyPath) -> AnyPath:
    """Return a path without links, but for one from the folder of a run to its checkpoints, as on a larger disk."""
    folder = path_at(path)
    if not isinstance(folder, Path) or folder.is_symlink() or folder.absolute().parent.name != CHECKPOINTS:
        return folder.resolve()
    return folder.absolute().parent.parent.resolve() / CHECKPOINTS / folder.name


def newest_of_transformers(folder: AnyPath) -> AnyPath | None:
    """Return the newest `checkpoint-N` of Hugging Face's Trainer in a folder; `None` without one."""
    from trainer_lib.checkpointing.third_party.third_party import TRAINER, library_of

    states = storage_of(folder).states()
    steps = {state: state.name.removeprefix("checkpoint-") for state in states if state.name.startswith("checkpoint-")}
    theirs = [state for state, step in steps.items() if step.isdecimal() and library_of(state) == TRAINER]
    return max(theirs, key=lambda state: int(steps[state]), default=None)


@frozen_dataclass
class ResumePoint:
    """Where a run begins: its folder, and the checkpoint to resume from.

    Attributes:
        folder: The run's folder; `None`: the run writes nothing.
        checkpoint: The checkpoint to resume from, or for a finished run the one to load; `None`: begin at step 0.
        is_finished: Whether the run is finished, so there is nothing to train.
        is_new: Whether the folder is for a new run, which no other program knows.
        notes: The warnings to log once this resume point is chosen.
    """

    folder: RunFolder | None
    checkpoint: AnyPath | None = None
    is_finished: bool = False
    is_new: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """Whether this run exists already, and did not record an end."""
        return self.folder is not None and not self.is_new and not self.folder.is_finished

    @property
    def needs_lease(self) -> bool:
        """Whether this run exists already and will write to its folder."""
        return self.folder is not None and not self.is_new and not self.is_finished


def find_resume_point(
    root: AnyPath | None, name: str | None, resume: str, group: ProcessGroup, fingerprint: Any
) -> tuple[ResumePoint, Lease]:
    """Return where a run resumes, with every byte of its checkpoint verified, and the lease of its folder.

    All ranks get the same resume point; the first rank holds the lease.

    A damaged checkpoint is renamed and the one before it is used, unless `resume` names the damaged one.

    Args:
        root: The folder of all runs.
        name: The user's name for the run.
        resume: "never", "auto", "extend", or the path of a checkpoint or of a run.
        group: The process group.
        fingerprint: The models and data of the run.

    Raises:
        ConfigurationError: If there is nothing to resume from.
        DamagedError: If `resume` names a damaged checkpoint.
    """
    damage: list[str] = []
    with ExitStack() as on_error:
        lease = Lease(None)
        while True:
            point = run_on_main_process(group, "fit", partial(_look_for_run, root, name, resume, fingerprint))
            if point.folder is not None and point.needs_lease and point.folder.path != lease.folder:
                lease.release()
                lease = on_error.enter_context(_acquired_lease(point.folder, group))
                continue  # another program may have continued the run meanwhile
            if point.checkpoint is None:
                break
            found_damage = _verified_damage(point.checkpoint, resume, group)
            if found_damage is None:
                break
            damage.append(found_damage)
        on_error.pop_all()
    for note in point.notes:
        _logger.warning("%s", note)
    if damage:
        _logger.warning("%s Resuming from %s.", " ".join(damage), point.checkpoint or "the beginning")
    if not point.needs_lease:  # a new run acquires its lease when it begins and its folder is made
        lease.release()
        lease = Lease(None if point.folder is None or point.is_finished else point.folder.path)
    elif group.rank == 0 and point.folder is not None:
        _delete_debris(point.folder.path / CHECKPOINTS)
    return point, lease


def _verified_damage(checkpoint: AnyPath, resume: str, group: ProcessGroup) -> str | None:
    """Verify a checkpoint of this library; return its damage after renaming it, `None` if it has none."""
    from trainer_lib.checkpointing.load.fallback import open_verified, set_aside
    from trainer_lib.checkpointing.third_party.third_party import library_of

    if library_of(checkpoint) is not None:
        return None
    try:
        open_verified(checkpoint, group, "fit", group.rank, group.size, is_loaded_next=True)
    except DamagedError as error:
        if checkpoint == _resolved(resume):
            raise
        renamed = set_aside(checkpoint, group, "fit", leads=group.rank == 0)
        return f"{error} It is now called {renamed.name}."
    return None


def _acquired_lease(folder: RunFolder, group: ProcessGroup) -> Lease:
    """Return the lease of an existing run, held by the first rank; raise on all ranks if another program has it."""
    lease = Lease(folder.path)
    run_on_main_process(group, "fit", lease.acquire)
    return lease


def _look_for_run(root: AnyPath | None, name: str | None, resume: str, fingerprint: Any) -> ResumePoint:
    checkpoint = None if resume in ("never", "auto", "extend") else checkpoint_at(resume)
    if root is None:
        if resume in ("auto", "extend"):
            raise ConfigurationError(f'resume="{resume}" looks for a run in output_dir. Give output_dir.')
        return ResumePoint(None, checkpoint)
    _check_writable(root)
    found = find_runs(root.absolute())  # the program may change its current directory while it trains
    number = 1 + max((candidate.run.facts.get("number", 0) for candidate in found), default=0)
    new = ResumePoint(new_run(root, name, fingerprint, number), is_new=True)
    if checkpoint is None:
        return _continued_or_new(root, found, new, resume, fingerprint)
    run = _continued(checkpoint, root, fingerprint)
    return replace(new, checkpoint=checkpoint) if run is None else ResumePoint(run, checkpoint)


def _continued_or_new(
    root: AnyPath, found: list[FoundRun], new: ResumePoint, resume: str, fingerprint: Any
) -> ResumePoint:
    """Return the newest run of the same models and data, as `resume` demands, else the new one."""
    from trainer_lib.trainer.checkpoints.finished_runs import describe_other_runs, final_checkpoint, is_finished

    runs = [candidate.run for candidate in found if candidate.mismatch(fingerprint) is None]
    unfinished = [run for run in runs if not is_finished(run) and run.newest_checkpoint() is not None]
    if resume == "never":
        return _with_notes(new, _describe_unfinished(unfinished))
    if runs and is_finished(runs[-1]):
        if resume == "extend":
            return ResumePoint(runs[-1], _checkpoint_of_finished(runs[-1]))
        point = ResumePoint(runs[-1], final_checkpoint(runs[-1]), is_finished=True)
        return _with_notes(point, _describe_finished(runs[-1], unfinished))
    if unfinished:
        point = ResumePoint(unfinished[-1], unfinished[-1].newest_checkpoint())
        return _with_notes(point, _describe_rebuilt(found, unfinished[-1]), _describe_older(unfinished))
    for run in runs:
        if run.newest_checkpoint() is None and not is_leased(run.path):
            _delete_debris(run.path / CHECKPOINTS)  # of a first save that was killed: nothing resumes this run
    return _with_notes(
        new,
        describe_other_runs(found, fingerprint, resume),
        _describe_runs_nearby(root, resume),
        _describe_checkpoint_of_transformers(root, resume),
    )


def _with_notes(point: ResumePoint, *notes: str | None) -> ResumePoint:
    return replace(point, notes=tuple(note for note in notes if note is not None))


def _describe_finished(run: RunFolder, unfinished: list[RunFolder]) -> str:
    older = f" An older run is not finished: resume={str(unfinished[-1].path)!r} resumes it." if unfinished else ""
    return (
        f'The run {run.path} is finished: there is nothing to train. To train it further, give resume="extend" and '
        f'more steps or epochs; for a new run give resume="never".{older}'
    )


def _describe_unfinished(unfinished: list[RunFolder]) -> str | None:
    if not unfinished:
        return None
    return f'The run {unfinished[-1].path} is unfinished, and a new run begins. To resume it, give resume="auto".'


def _describe_older(unfinished: list[RunFolder]) -> str | None:
    """Return the warning for unfinished runs besides the newest one, which is resumed."""
    if len(unfinished) < 2:
        return None
    older = unfinished[-2].path
    return f"{unfinished[-1].path} is resumed. An older run is not finished either: resume={str(older)!r} resumes it."


def _describe_runs_nearby(root: AnyPath, resume: str) -> str | None:
    """Return the warning for runs that are not where runs are looked for: a level deeper, or around `root`."""
    root = root.absolute()
    around = [root, *([root.parent] if root.name == CHECKPOINTS else [])]
    around += [root.parent.parent] if root.parent.name == CHECKPOINTS else []
    deeper = [path.parent for path in root.glob(f"*/*/{RUN_FILE}")]
    runs = [RunFolder(path) for path in (*around, *deeper)]
    nearby = next((run for run in runs if run.newest_checkpoint() is not None), None)
    if nearby is None:
        return None
    return (
        f'resume="{resume}" begins a new run, at step 0, in output_dir={str(root)!r}. There are checkpoints in '
        f"{nearby.path}: output_dir={str(nearby.path.parent)!r} finds this run, and resume={str(nearby.path)!r} "
        "resumes it."
    )


def _describe_checkpoint_of_transformers(root: AnyPath, resume: str) -> str | None:
    """Return the warning for checkpoints of Hugging Face's Trainer in the folder of the runs."""
    newest = newest_of_transformers(root)
    if newest is None:
        return None
    return (
        f"{newest} is a checkpoint of Hugging Face's Trainer, and resume={resume!r} looks for runs of this library: a "
        f"new run begins. To resume from it, give resume={str(newest)!r}."
    )


def _describe_rebuilt(found: list[FoundRun], run: RunFolder) -> str | None:
    """Return the warning for a run whose run.json is missing or damaged."""
    problem = next(candidate.problem for candidate in found if candidate.run is run)
    if problem is None:
        return None
    return (
        f"{run.path / RUN_FILE} could not be used: {problem}. It is rebuilt from the run's newest checkpoint and "
        "written again."
    )


def _continued(checkpoint: AnyPath, root: AnyPath, fingerprint: Any) -> RunFolder | None:
    """Return the run that a checkpoint continues; `None` if it begins a new run."""
    folder = checkpoint.parent.parent
    if folder.parent != root.resolve():
        return None
    run = read_run(folder, fingerprint)
    if checkpoint == run.newest_checkpoint():
        return run
    # Otherwise one folder would hold two runs: its later checkpoints belong to other updates than those to come.
    _logger.warning(
        "%s is not the newest checkpoint of its run: that run stays unchanged, and a new run begins.", checkpoint
    )
    return None


def _checkpoint_of_finished(run: RunFolder) -> AnyPath:
    newest = run.newest_checkpoint()
    if newest is None:
        raise ConfigurationError(
            f'resume="extend": the run {run.path} is finished and has no checkpoint to resume from. Give '
            'resume="never" for a new run.'
        )
    return newest


def _check_writable(root: AnyPath) -> None:
    try:
        storage_of(root).check_writable()
    except (OSError, UnreachableError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ConfigurationError(
            f"output_dir={str(root)!r} cannot be written to: {reason}. Give a folder that you can write to."
        ) from error


def _delete_debris(checkpoints: AnyPath) -> None:
    """Delete what interrupted saves of this run left. A failure is only logged: the files do no harm."""
    try:
        storage_of(checkpoints).delete_debris()
    except (OSError, UnreachableError) as error:
        _logger.warning("The files of an interrupted save in %s could not be deleted: %s", checkpoints, error)
