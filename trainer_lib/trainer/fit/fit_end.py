"""The end of a fit: after its last step, by an interruption, or by an error."""

import contextlib
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError, DamagedError
from trainer_lib.logging import get_logger
from trainer_lib.processes.exit_codes import Interruption
from trainer_lib.runs.run_lease import Lease
from trainer_lib.trainer.checkpoints import run_records
from trainer_lib.trainer.checkpoints.owed_requests import OwedRequests
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.evaluation.fit_evaluations import FitEvaluations
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.saving import Saving
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.optim import optimizer_modes
from trainer_lib.trainer.result import FitResult

_logger = get_logger(__name__)


class FitEnd:
    """Ends a fit.

    Args:
        context: The fit.
        log: Logs what the last step leaves.
        evaluations: Evaluates what the last step leaves.
        saving: Saves the last step.
        saver: The checkpoints of the run.
        owed: What an interrupted step leaves to the resumed run.
        lease: The right to write into the run's folder.
    """

    def __init__(
        self,
        context: FitContext,
        log: TrainLog,
        evaluations: FitEvaluations,
        saving: Saving,
        saver: CheckpointSaver,
        owed: OwedRequests,
        lease: Lease,
    ) -> None:
        self._context, self._run, self._log, self._evaluations = context, context.run, log, evaluations
        self._saving, self._saver, self._owed, self._lease = saving, saver, owed, lease

    def agreed_interruption(self) -> Interruption | None:
        """Return what asked any rank to save and end, by a message of its own."""
        gathered: list[Interruption | None] = self._context.group.all_gather_objects(self._run.control.interruption)
        return next((interruption for interruption in gathered if interruption is not None), None)

    def interrupt(self, owed: dict[str, str | None]) -> None:
        """Save, and end for now.

        Args:
            owed: What this step leaves to the resumed run.
        """
        run, state = self._run, self._run.state
        interruption = self.agreed_interruption()
        assert interruption is not None
        self._owed.interruption, self._owed.requests = interruption, owed
        state.status, state.reason = "interrupted", interruption.reason
        is_asked = run.control.take("save") or "save" in owed
        if self._context.folder is not None and (run.args.save_interval is not None or is_asked) and state.step:
            run.control.save_reasons.add("interruption")
            self._saving.save()
        self._saver.flush()
        self._context.events.fire("on_interrupt", run)
        last = state.checkpoints[-1] if state.checkpoints else None
        _logger.warning(
            "%s: the run ends at step %d, and %s.",
            state.reason,
            state.step,
            "nothing of it is saved"
            if last is None
            else f'resume="auto" resumes it from step {last["step"]}, {last["path"]}',
        )

    def finish(self) -> None:
        """Do what the last step leaves to do: log, evaluate, save; its state survives an error meanwhile."""
        try:
            self._finish()
        except Exception as error:
            self._saving.save_after(error)
            raise

    def _finish(self) -> None:
        run, state, args = self._run, self._run.state, self._run.args
        self._log.log()
        run.control.sync_across_ranks(self._context.group)  # no gradients carried the requests of the last step
        reason = run.control.reason
        if self._context.evaluation.interval is not None and not self._evaluations.evaluate_rest():
            self._saver.forget_step()  # its checkpoint does not hold what asked for the end
            self.interrupt({"stop": reason} if reason else {})
            return
        if not reason:
            run.control.forget("stop")  # the last evaluation asked for it: a resumed run would be stopped
        state.status, state.reason = ("stopped" if reason else "finished"), reason
        is_best = args.keep_best > 0 and state.best is not None and state.best.step == state.step
        is_asked = run.control.take("save")
        saves_the_end = self._context.folder is not None and (args.save_interval is not None or is_best or is_asked)
        if saves_the_end:
            self._saving.save()
        self._saver.flush()
        if saves_the_end and self._saver.failure is not None:
            state.status = "unsaved"
        if args.load_best_at_end and state.best is not None:
            self._load_best()
        # Nothing is left undone; but whoever sent a signal gets its exit code.
        self._owed.interruption = self.agreed_interruption()

    def close(self, status: Any) -> None:
        """Record how the run ended, and let the callbacks know."""
        context, run = self._context, self._run
        run.state.status = status
        run.batch = run.outputs = run.loss_sum = None
        self._saver.close()
        if status != "failed":
            optimizer_modes.evaluate(run.optimizers.values())
        try:
            context.events.fire("on_fit_end", run)
        finally:
            if context.folder is not None and run.is_main_process and self._lease.loss() is None:
                run_records.write_end(context.folder, run)
                context.folder.upload()

    def leave_together(self) -> None:
        """Wait for the other ranks: a launcher may take the first rank that ends for a failed one, and end the rest."""
        with contextlib.suppress(RuntimeError):  # one of them is gone already
            self._context.group.barrier()

    def result(self) -> FitResult:
        """Return the result of the run."""
        folder = self._context.folder
        report = None if folder is None else run_records.report_of(folder)
        return FitResult.of({"state": self._run.state.state_dict(), "metrics": self._run.metrics, "report": report})

    def _load_best(self) -> None:
        """Load the best checkpoint. A damaged or missing one is left out: the next best is loaded, with a warning."""
        run, state = self._run, self._run.state
        if self.result().best_checkpoint is None and run.args.keep_best == 0:
            raise ConfigurationError("load_best_at_end=True: the best evaluation was not saved. Leave keep_best at 1.")
        problems: list[str] = []
        self._saver.find()
        while (best := state.best) is not None:
            checkpoint = self.result().best_checkpoint
            if checkpoint is None and best.step == state.step:  # could not be written, and these are its weights
                break
            problem = self._problem_loading(checkpoint, best.step)
            if problem is None:
                break
            problems.append(problem)
            state.checkpoints = [entry for entry in state.checkpoints if entry["step"] != best.step]
            if best.step == state.step:
                break
            state.best = self._context.evaluation.best_of(state.checkpoints)
        if problems:
            _logger.warning(
                "load_best_at_end=True: %s The weights are those of step %d, the %s.",
                " ".join(problems),
                state.step if state.best is None else state.best.step,
                "last one" if state.best is None else f"best one left ({state.best.metric} {state.best.value:.6g})",
            )

    def _problem_loading(self, checkpoint: AnyPath | None, step: int) -> str | None:
        """Load a checkpoint; return why it could not be, `None` if it was. A damaged one is set aside."""
        run, group = self._run, self._context.group
        if checkpoint is None:
            return f"There is no checkpoint of the best evaluation, of step {step}."
        state = run.state.state_dict()
        try:
            with self._context.events.observer_states_kept():
                run.accelerator.load_state(checkpoint)
        except DamagedError as error:
            from trainer_lib.checkpointing.load.fallback import set_aside

            renamed = set_aside(checkpoint, group, "load_best_at_end", run.accelerator.checkpoints.leads)
            return f"{error} It is now called {renamed.name}."
        run.state.load_state_dict(state)
        return None
