"""What a run does after an update when it is asked to: flush, log, evaluate, interrupt, save, stop; in this order."""

from trainer_lib.trainer.checkpoints.owed_requests import OwedRequests
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.evaluation.fit_evaluations import FitEvaluations
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.fit_end import FitEnd
from trainer_lib.trainer.fit.saving import Saving
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.fit.triggers import Triggers

_EVALUATIONS = ("evaluate", "evaluate_sets")  # of all sets, and of those whose intervals are over


class Actions:
    """Handles the requests that all ranks know of.

    Args:
        context: The fit.
        triggers: Asks for what is due at intervals.
        saver: The checkpoints of the run.
        saving: Saves a step.
        log: Logs.
        evaluations: Evaluates.
        end: Interrupts the run.
        owed: What an interrupted run owes to its last step.
        was_unfinished: Whether the run resumes from a checkpoint that it did not save at its end.
    """

    def __init__(
        self,
        context: FitContext,
        *,
        triggers: Triggers,
        saver: CheckpointSaver,
        saving: Saving,
        log: TrainLog,
        evaluations: FitEvaluations,
        end: FitEnd,
        owed: OwedRequests,
        was_unfinished: bool,
    ) -> None:
        self._context, self._run, self._group = context, context.run, context.group
        self._triggers, self._saver, self._saving, self._log = triggers, saver, saving, log
        self._evaluations, self._end, self._owed = evaluations, end, owed
        self._was_unfinished = was_unfinished
        self._is_alone = context.group.size == 1  # requests of several ranks travel with their gradients
        self._is_stopped = False

    @property
    def is_over(self) -> bool:
        """Whether training is over: a limit is reached, or it was asked to stop."""
        return self._is_stopped or self._run.state.has_reached_limit

    def stop(self, reason: str) -> None:
        """End training."""
        self._run.control.reason = reason
        self._is_stopped = True

    def ask(self) -> None:
        """Ask for what is due after this update."""
        control = self._run.control
        self._triggers.ask(self._run)
        if self._saver.pending is not None:
            self._saver.request_flush()
        if self._is_alone:
            control.agree_alone()

    def handle(self) -> bool:
        """Do what was asked for, if anything was; return whether training is over."""
        is_over = self.is_over
        if not is_over and self._run.control.is_empty:
            return False
        self._handle()
        return self.is_over

    def _handle(self) -> None:
        control = self._run.control
        if control.take("flush"):
            self._saver.flush()
        if control.take("log") or self._ends:
            self._log.log()
        if any(map(control.is_due, _EVALUATIONS)) and not control.is_due("interrupt"):
            self._evaluate()
        if control.take("interrupt"):
            self._interrupt()
            return
        # The last step's checkpoint comes after the last evaluation, which the end of the fit makes.
        if not self._ends and control.take("save"):
            self._saving.save()
            if self._end.agreed_interruption() is not None:  # it came during this save: do not save again
                self._interrupt()
                return
        if control.take("stop"):
            self._is_stopped = True
            control.reason = control.reason or "a callback asked for it"

    def run_owed(self) -> None:
        """Do what an interrupted run owed to its last step; unless this one is interrupted as well."""
        context, control = self._context, self._run.control
        if self._end.agreed_interruption() is not None:
            control.agree("interrupt")
        if self._owed.requests or (self.is_over and self._was_unfinished):
            self._saver.forget_step()  # its checkpoint was saved before the owed evaluation
        possible = {"save": context.folder is not None, "stop": True}
        for name, reason in self._owed.requests.items():
            if possible.get(name, bool(context.evaluation.sets)):  # with the data and arguments of this program
                control.agree(name)
                control.reason = control.reason or reason
        if not control.is_empty:
            self._handle()

    def end_epoch_on_request(self) -> bool:
        """Whether all ranks know that somebody asked for the end of this epoch."""
        control = self._run.control
        if self._is_alone:
            control.agree_alone()
        return control.take("end_epoch")

    @property
    def _ends(self) -> bool:
        return self.is_over or self._run.control.is_due("stop")

    def _evaluate(self) -> None:
        control = self._run.control
        if self._evaluations.evaluate_due(is_last=self._ends):
            for name in _EVALUATIONS:
                control.take(name)
            control.sync_across_ranks(self._group)
        else:
            control.agree("interrupt")

    def _interrupt(self) -> None:
        """Save and end; what else was asked for is owed to the resumed run, so that it takes no time now."""
        control = self._run.control
        is_before_save = any(
            map(control.is_due, _EVALUATIONS)
        )  # else the interruption's checkpoint is the one asked for
        names = (*_EVALUATIONS, "save", "stop") if is_before_save else ("stop",)
        owed = [name for name in names if control.take(name)]
        self._end.interrupt({name: control.reason if name == "stop" else None for name in owed})
        self._is_stopped = True
