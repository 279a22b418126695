"""`AcceleratedScheduler`: a learning-rate schedule that steps once per optimizer step."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from trainer_lib.state.gradient_state import GradientState
from trainer_lib.state.partial_state import PartialState


class AcceleratedScheduler:
    """A schedule that steps with its optimizers: not within an accumulation window, not on skipped updates.

    Args:
        scheduler: The schedule to wrap.
        optimizers: The prepared optimizers it belongs to.
        step_with_optimizer: Whether you call `step` along with the optimizer's; else each call moves the schedule (for
            example once an epoch).
        split_batches: Whether the batch size counts the samples of all ranks; matters for `once_per_process` only.
        once_per_process: Step once for each rank instead of once an update, as Accelerate does.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Optimizer | Sequence[Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        once_per_process: bool = False,
    ) -> None:
        self.scheduler = scheduler
        # Keep the list itself: an optimizer may be prepared after its schedule.
        self.optimizers: Sequence[Any] = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state: GradientState = GradientState()
        self._moves = PartialState().data_group.size if once_per_process and not split_batches else 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if its optimizers updated."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
        else:
            for optimizer in self.optimizers:
                if getattr(optimizer, "step_was_skipped", False):
                    return
            for _ in range(self._moves):
                # A schedule with a fixed length raises if it is stepped past its end.
                if self._moves == 1 or self._has_steps_left():
                    self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rates."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """Return the learning rates the schedule computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rates."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the schedule's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the wrapped schedule."""
        if name == "scheduler":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _has_steps_left(self) -> bool:
        total = getattr(self.scheduler, "total_steps", None)
        return total is None or self.scheduler.last_epoch < total


# Schedules with DeepSpeed are wrapped like all others.
DeepSpeedSchedulerWrapper = AcceleratedScheduler
