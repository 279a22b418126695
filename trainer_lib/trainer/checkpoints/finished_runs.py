"""Finished runs: whether their last checkpoint still exists, which weights they ended with, and how to load them."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from trainer_lib.events import Best, Control, Modifier, RunState
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.logging import get_logger
from trainer_lib.runs import FoundRun, RunFolder
from trainer_lib.trainer.checkpoints.existing_checkpoints import existing_checkpoints
from trainer_lib.trainer.checkpoints.run_records import report_of
from trainer_lib.trainer.fit.session import FitSession
from trainer_lib.trainer.optim import optimizer_modes
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.trainer_interface import TrainerInterface

_logger = get_logger(__name__)

_SHOWN = 3  # runs in a warning


def is_finished(run: RunFolder) -> bool:
    """Whether a run finished, and its last checkpoint was not renamed as damaged since."""
    state = run.facts.get("state")
    if not run.is_finished or not isinstance(state, dict):
        return False
    last = run.checkpoint(state["step"])
    return last in run.checkpoints() or not any(last.parent.glob(f"{last.name}.damaged*"))


def final_checkpoint(run: RunFolder) -> AnyPath | None:
    """Return the checkpoint with the weights that a finished run ended with; `None` without a checkpoint."""
    good = _good(_entries(run))
    best = _best_left(run, good)
    chosen = [entry for entry in good if best is not None and entry["step"] == best.step] or good
    return path_at(chosen[-1]["path"]) if chosen else None


def describe_other_runs(found: list[FoundRun], fingerprint: dict[str, Any], resume: str) -> str | None:
    """Return the warning for a new run in a folder with checkpoints: why no run matches, and how to resume one."""
    lines: list[str] = []
    for candidate in reversed(found):
        run, checkpoint = candidate.run, candidate.run.newest_checkpoint()
        if checkpoint is not None:
            reason = candidate.mismatch(fingerprint) or "it is finished"
            lines.append(f"{run.path} has {checkpoint.name}, but {reason}; resume={str(run.path)!r} resumes it.")
    if not lines:
        return None
    more = [f"{len(lines) - _SHOWN} more runs there do not match either."] if len(lines) > _SHOWN else []
    begins = f'resume="{resume}" begins a new run, at step 0, although there are checkpoints.'
    return " ".join([begins, *lines[:_SHOWN], *more])


def load_finished(trainer: TrainerInterface, run: RunFolder, checkpoint: AnyPath | None) -> FitResult:
    """Load the weights that a finished run ended with, and return its result. It writes nothing."""
    facts = run.facts
    state = {**facts["state"], "checkpoints": _entries(run)}
    if checkpoint is None:
        _logger.warning("%s has no checkpoint to load: the model keeps its current weights.", run.path)
        return FitResult.of({**facts, "state": state, "report": report_of(run)})
    session = FitSession(trainer, run, Signals((), Control(), trainer.accelerator.is_main_process))
    trainer.run = session.run
    try:
        last = path_at(_good(state["checkpoints"])[-1]["path"])
        if last != checkpoint:  # callbacks that observe know the whole run, as after load_best_at_end in training
            session.loading.load(last)
        with session.context.events.observer_states_kept() if last != checkpoint else nullcontext():
            session.loading.load(checkpoint)
        fire_modifiers(session, "on_fit_begin")
        session.run.state = RunState.of(state)
        session.run.state.best = _best_left(run, _good(state["checkpoints"])) or session.run.state.best
        session.run.metrics = dict(facts["metrics"])
        session.average_at_end(session.run.state.status)
        optimizer_modes.evaluate(session.run.optimizers.values())
        fire_modifiers(session, "on_fit_end")  # which replaces the weights by their averages (EMA, SWA)
        session.average_at_end(session.run.state.status)
    finally:
        session.release()
    return session.end.result()


def fire_modifiers(session: FitSession, event: str) -> None:
    """Call the callbacks that modify training. Those that report are not called, as nothing is trained."""
    for callback in session.context.events:
        if isinstance(callback, Modifier):
            getattr(callback, event)(session.run)


def _best_left(run: RunFolder, entries: Sequence[Mapping[str, Any]]) -> Best | None:
    """Return the best evaluation that a finished run loaded at its end, or the next best if its checkpoint is gone."""
    best, arguments = RunState.of(run.facts["state"]).best, run.facts.get("arguments") or {}
    if best is None or not arguments.get("load_best_at_end"):
        return None
    metrics = {entry["step"]: entry["metrics"] for entry in entries}
    if best.step in metrics:
        return best
    from trainer_lib.checkpointing.save.retention import best_first
    from trainer_lib.foundation.metric_names import greater_is_better_for

    steps = best_first(entries, best.metric, greater_is_better_for(best.metric, arguments.get("greater_is_better")))
    return Best(best.metric, float(metrics[steps[0]][best.metric]), steps[0]) if steps else None


def _entries(run: RunFolder) -> list[dict[str, Any]]:
    state = run.facts["state"]
    return existing_checkpoints(state["checkpoints"], run, state["step"])


def _good(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if not entry.get("nonfinite")]
