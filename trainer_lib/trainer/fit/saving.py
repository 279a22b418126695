"""Saving a fit: once a step, and after an error between two updates."""

import json

from trainer_lib.foundation.errors import ConfigurationError, NonFiniteError, RunInUseError, StateError
from trainer_lib.logging import get_logger
from trainer_lib.trainer.checkpoints.owed_requests import OwedRequests
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.evaluation.fit_evaluations import FitEvaluations
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.train_clock import TrainClock
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.safety.deadline import Deadline

_logger = get_logger(__name__)

# Errors after which nothing is saved: the state is not good, or cannot be saved.
_NOT_SAVED_AFTER = (NonFiniteError, StateError, RunInUseError)
_PATIENCE_AFTER_ERRORS = 5.0  # seconds that a rank with an error waits for the others to raise theirs


class Saving:
    """Saves the state of a fit.

    Args:
        context: The fit.
        saver: Writes the checkpoints.
        log: Reports what belongs to the steps so far.
        evaluations: The evaluations, whose metrics a checkpoint lists.
        owed: What the last step owes to a resumed run.
        clock: Counts the time of training.
        deadline: When the run has to end.
    """

    def __init__(
        self,
        context: FitContext,
        saver: CheckpointSaver,
        log: TrainLog,
        evaluations: FitEvaluations,
        owed: OwedRequests,
        clock: TrainClock,
        deadline: Deadline,
    ) -> None:
        self._context, self._run, self._saver = context, context.run, saver
        self._log, self._evaluations, self._owed = log, evaluations, owed
        self._clock, self._deadline = clock, deadline

    def save(self) -> None:
        """Save a checkpoint, unless this step is saved already."""
        folder, state = self._context.folder, self._run.state
        if folder is None and self._run.args.dry_run:
            return
        if folder is None:
            raise ConfigurationError("A checkpoint was requested, and output_dir is not set. Give output_dir.")
        if self._saver.saved_step == state.step:
            return
        self._log.flush()
        self._log.sync_findings()
        self._saver.saved_step = state.step
        self._saver.save(folder.checkpoint(state.step), self._evaluations.metrics_of_step)
        self._clock.restart()
        self._deadline.begin_step()

    def save_after(self, error: Exception) -> None:
        """Save the state after the last update, which an error did not touch; a failed save is only warned of.

        With several ranks, all of them have to raise: an error on some leaves the others where they cannot save.
        """
        state = self._run.state
        if not self._is_wanted_after(error):
            return
        self._take_requests()
        if not self._are_all_ranks_here():
            error.add_note(
                f"The state after step {state.step} is not saved: within {_PATIENCE_AFTER_ERRORS:g} seconds not all "
                "ranks raised an error after that step and before the next one."
            )
            return
        self._owed.follows_error, state.status = True, "running"
        self._run.control.save_reasons.add("exception")
        try:
            self.save()
            self._saver.flush()
        except Exception as failure:  # noqa: BLE001 - the first error is the one to be told
            _logger.warning("After an error the state of step %d could not be saved: %s", state.step, failure)
            return
        if self._saver.failure is None:
            path = state.checkpoints[-1]["path"]
            error.add_note(f'The state after step {state.step} is saved in {path}; resume="auto" resumes it.')

    def _is_wanted_after(self, error: Exception) -> bool:
        args, step = self._run.args, self._run.state.step
        saves = self._context.folder is not None and args.save_interval is not None and args.on_exception == "save"
        return saves and not isinstance(error, _NOT_SAVED_AFTER) and step > 0 and self._saver.saved_step != step

    def _take_requests(self) -> None:
        control = self._run.control
        owed = ("stop",) if self._evaluations.is_done else ("evaluate", "evaluate_sets", "stop")
        self._owed.requests = {name: control.reason for name in owed if control.is_due(name)}

    def _are_all_ranks_here(self) -> bool:
        """Whether an error left all ranks after the same update, with the same left to do."""
        state = self._run.state
        evaluated = sorted(self._evaluations.last.sets)
        place = json.dumps([state.step, state.samples, state.status, evaluated, self._owed.requests])
        name = f"after_error/{state.run_id}/{state.step}"
        return self._context.group.meet(name, place, _PATIENCE_AFTER_ERRORS)
