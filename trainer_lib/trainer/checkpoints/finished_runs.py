"""Finished runs: whether their last state is still on disk, which weights they ended with, and loading these."""

from typing import TYPE_CHECKING, Any

from trainer_lib.events import Control, Modifier, RunState
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.logging import get_logger
from trainer_lib.runs import FoundRun, RunFolder
from trainer_lib.trainer.checkpoints.existing_checkpoints import existing_checkpoints
from trainer_lib.trainer.checkpoints.run_records import report_of
from trainer_lib.trainer.fit.session import Fitting
from trainer_lib.trainer.optim import optimizer_modes
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.safety.signals import Signals

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_logger = get_logger(__name__)

_SHOWN = 3  # runs in a warning


def is_finished(run: RunFolder) -> bool:
    """Whether a run came to its end, and its last checkpoint was not set aside as damaged since."""
    state = run.facts.get("state")
    if not run.is_finished or not isinstance(state, dict):
        return False
    last = run.checkpoint(state["step"])
    return last in run.checkpoints() or not any(last.parent.glob(f"{last.name}.damaged*"))


def final_checkpoint(run: RunFolder) -> AnyPath | None:
    """Return the checkpoint with the weights that a finished run ended with; `None` where it has none."""
    entries = _entries(run)
    state, arguments = run.facts["state"], run.facts.get("arguments") or {}
    best = state["best"]["step"] if arguments.get("load_best_at_end") and state["best"] is not None else None
    good = [entry for entry in entries if not entry.get("nonfinite")]
    chosen = [entry for entry in good if entry["step"] == best] or good
    return path_at(chosen[-1]["path"]) if chosen else None


def describe_other_runs(found: list[FoundRun], what: dict[str, Any]) -> str | None:
    """Return what to say where a new run begins although there are checkpoints: whose, why, and how to resume them."""
    told: list[str] = []
    for candidate in reversed(found):
        run, checkpoint = candidate.run, candidate.run.newest_checkpoint()
        if checkpoint is not None:
            why = candidate.mismatch(what) or "it is finished"
            told.append(f"{run.path} has {checkpoint.name}, but {why}; resume={str(run.path)!r} resumes it.")
    if not told:
        return None
    more = [f"{len(told) - _SHOWN} more runs there do not match either."] if len(told) > _SHOWN else []
    begins = 'resume="auto" begins a new run, at step 0, although there are checkpoints.'
    return " ".join([begins, *told[:_SHOWN], *more])


def load_finished(trainer: "Trainer", run: RunFolder, checkpoint: AnyPath | None) -> FitResult:
    """Load the weights that a finished run ended with, and return its result; nothing is written."""
    facts = run.facts
    state = {**facts["state"], "checkpoints": _entries(run)}
    if checkpoint is None:
        _logger.warning("%s has no checkpoint to load: the weights stay those that the model was given.", run.path)
        return FitResult.of({**facts, "state": state, "report": report_of(run)})
    fitting = Fitting(trainer, run, Signals((), Control(), trainer.accelerator.is_main_process))
    trainer.run = fitting.run
    try:
        fitting.load(checkpoint)
        _fire(fitting, "on_fit_begin")
        fitting.run.state = RunState.of(state)
        fitting.run.metrics = dict(facts["metrics"])
        optimizer_modes.evaluate(fitting.run.optimizers.values())
        _fire(fitting, "on_fit_end")  # which puts averages of weights (EMA, SWA) in the place of the weights
    finally:
        fitting.release()
    return fitting.result()


def _fire(fitting: Fitting, event: str) -> None:
    """Call the callbacks that modify training, and none that report: nothing is trained."""
    for callback in fitting.events:
        if isinstance(callback, Modifier):
            getattr(callback, event)(fitting.run)


def _entries(run: RunFolder) -> list[dict[str, Any]]:
    state = run.facts["state"]
    return existing_checkpoints(state["checkpoints"], run, state["step"])
