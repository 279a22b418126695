"""Options of gradient accumulation."""

import dataclasses
from dataclasses import dataclass

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import KwargsHandler, check_count, check_flag


@dataclass(repr=False, eq=False)
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one update, and where a window ends.

    Args:
        num_steps: The micro-batches of one update.
        adjust_scheduler: Count the micro-batches that do not update in the scheduler's `_step_count` too, as
            Accelerate does. The learning rate moves once per update either way.
        sync_with_dataloader: End the window with the last batch of the loader, so that a short window updates.
        sync_each_batch: Reduce the gradients across ranks after each micro-batch instead of once per window: more
            traffic, but less memory where gradients are sharded.
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
    """Return one plugin from the two ways to give the number of steps; by default with the launcher's number."""
    if steps is not None:
        check_count("gradient_accumulation_steps", steps)
    of_plugin = None if plugin is None else plugin.num_steps
    # Scripts written for Accelerate pass 1 when the plugin holds the number.
    if of_plugin is not None and steps not in (None, 1, of_plugin):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and GradientAccumulationPlugin(num_steps={of_plugin}) "
            "contradict each other. Give one of them."
        )
    num_steps = of_plugin or steps or environment.accumulation_steps_requested()
    return dataclasses.replace(plugin or GradientAccumulationPlugin(), num_steps=num_steps)
