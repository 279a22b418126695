"""Options of gradient accumulation."""

import dataclasses
from dataclasses import dataclass

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import KwargsHandler, check_count, check_flag


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one update, and where a window ends.

    Args:
        num_steps: The micro-batches of one update.
        adjust_scheduler: Count the micro-batches that do not update in the scheduler's `_step_count` too, as
            Accelerate does. The learning rate moves once per update either way.
        sync_with_dataloader: End the window with the last batch of the loader, so that a short window updates.
        sync_each_batch: Reduce the gradients over the processes after each micro-batch instead of once a window:
            more traffic, less memory where gradients are sharded.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_steps is not None:
            check_count("num_steps", self.num_steps)
        for name in ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"):
            check_flag(name, getattr(self, name))


def accumulation_plugin(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return one plugin for the two ways to give the number of steps; the launcher's number if neither says."""
    if steps is not None:
        check_count("gradient_accumulation_steps", steps)
    given = None if plugin is None else plugin.num_steps
    # 1 is what scripts written for Accelerate pass when they mean the plugin to say it.
    if given is not None and steps not in (None, 1, given):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and GradientAccumulationPlugin(num_steps={given}) "
            "contradict each other. Give one of them."
        )
    num_steps = given or steps or environment.accumulation_steps_requested()
    return dataclasses.replace(plugin or GradientAccumulationPlugin(), num_steps=num_steps)
