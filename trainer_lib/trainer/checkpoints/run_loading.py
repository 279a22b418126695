"""Loading a checkpoint into a run: counts and schedules follow the arguments of now."""

import math
from collections.abc import Collection, Mapping

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.logging import get_logger
from trainer_lib.trainer.checkpoints import resume_arguments
from trainer_lib.trainer.checkpoints.resume_schedules import FreshOptimizers
from trainer_lib.trainer.checkpoints.run_state_part import RunStatePart
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.optim import optimizer_modes

_logger = get_logger(__name__)


class RunLoading:
    """Loads checkpoints into a run.

    Args:
        context: The fit.
        part: The state of the run in a checkpoint.
        saver: The checkpoints of the run.

    Attributes:
        changed: The arguments that differ from those of the checkpoint that was loaded last.
    """

    def __init__(self, context: FitContext, part: RunStatePart, saver: CheckpointSaver) -> None:
        self._context, self._run, self._part, self._saver = context, context.run, part, saver
        self.changed: Mapping[str, resume_arguments.Difference] = {}

    def load(self, checkpoint: AnyPath) -> None:
        """Load a checkpoint."""
        context, run = self._context, self._run
        context.events.fire("on_load_begin", run, checkpoint)
        self.changed = changed = resume_arguments.changed_arguments(run.args, checkpoint, context.group)
        resume_arguments.warn_of_changes(changed, checkpoint)
        fresh = FreshOptimizers(run)
        with resume_arguments.naming_arguments(changed):
            run.accelerator.load_state(checkpoint)
        optimizer_modes.train(run.optimizers.values())
        if context.folder is not None:  # not the checkpoint's, if that is of another run
            run.state.run_id = context.folder.run_id
        self._saver.find()
        fresh.apply(changed, *self._recount())
        self._forget_best_of_another_metric(changed)
        self._saver.saved_step = run.state.step
        context.events.fire("on_load_end", run, checkpoint)

    def _recount(self) -> tuple[int, bool]:
        """Count in the updates of now, if their size differs from that in the checkpoint.

        Returns:
            How many steps to advance schedules by, and whether the number of updates per epoch changed.
        """
        context, state, saved, args = self._context, self._run.state, self._part.loaded, self._run.args
        moved, length = 0, state.steps_per_epoch
        if length is not None:
            accumulated = context.accelerator.gradient_accumulation_steps
            state.steps_in_epoch = length - math.ceil(context.loader.batches_left / accumulated)
            context.recount_steps()
            is_of_epochs = state.max_epochs is not None and state.max_steps != args.max_steps
            if is_of_epochs and args.schedule_steps is None and saved["steps_per_epoch"]:
                # A schedule of epochs stays where it is in the samples, which are more or fewer updates now.
                behind = (context.updates_in(state.epoch) or 0) + state.steps_in_epoch
                moved = behind - self._part.loaded_position
        return moved, length != saved["steps_per_epoch"]

    def _forget_best_of_another_metric(self, changed: Collection[str]) -> None:
        state, metric = self._run.state, self._context.evaluation.best_metric
        if state.best is None or metric is None:
            return
        if state.best.metric != metric or "greater_is_better" in changed:
            _logger.warning(
                "The best evaluation so far, of step %d, was chosen by %s. From now on the best is chosen by %s.",
                state.best.step,
                state.best.metric,
                metric,
            )
            state.best = None
