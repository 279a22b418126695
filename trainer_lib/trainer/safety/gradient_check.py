"""The checks of the first update: that there are gradients at all, and that ranks hold the same weights."""

from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.losses.loss_checks import no_gradients
from trainer_lib.trainer.losses.unused_parameters_error import check_all_used

_PATIENCE = 10  # updates of a training_step of the user without any gradient, before that is an error


class GradientCheck:
    """Checks updates until the first one with gradients.

    Args:
        context: What is trained.
    """

    def __init__(self, context: FitContext) -> None:
        self._run, self._models, self._named_models = context.run, context.models, context.named_models
        self._group = context.group
        # All ranks begin their fits together, so they count them alike.
        self._fit = self._group.store("replicas").add(f"fits/{self._group.rank}", 1)
        self._has_own_step = context.has_own_step  # a training_step of the user may leave out some batches
        self._without = 0  # updates without any gradient
        self.is_done = False

    def check(self) -> None:
        """Check an update before its optimizers step.

        Raises:
            ConfigurationError: If no parameter has a gradient, or one has none where the ranks wait for all of them.
        """
        optimizers = self._run.optimizers.values()
        has_stepped = any(optimizer.has_stepped or optimizer.has_updated for optimizer in optimizers)
        accelerator = self._run.accelerator
        if not has_stepped and accelerator.strategy.withholds_gradients():
            accelerator.unscale_gradients()  # this puts them into `grad`
        trained = self._run.trained_parameters
        has_gradients = any(parameter.grad is not None for parameter in trained)
        if not any(parameter.requires_grad for parameter in trained):
            has_gradients = True  # a stage of a pipeline whose weights are all frozen: the loss depends on other stages
        self.is_done: bool = has_stepped or has_gradients
        if not has_stepped:
            check_all_used(self._models)
        self._without += not self.is_done
        if self._without > (_PATIENCE if self._has_own_step else 0):
            no_gradients(self._has_own_step)
        if self._group.size > 1 and self.is_done and not has_stepped:
            from trainer_lib.trainer.safety.replica_check import warn_of_different_replicas

            warn_of_different_replicas(self._named_models, accelerator.strategy, self._group, self._fit)

    def finish(self) -> None:
        """Raise if no update of the fit had any gradient."""
        if self._without and not self.is_done:
            no_gradients(self._has_own_step)
