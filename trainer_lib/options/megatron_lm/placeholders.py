"""A stand-in for the schedule that a `MegatronLMPlugin` describes."""

import math
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count


class MegatronLMDummyScheduler:
    """Stands for the schedule of a `MegatronLMPlugin`; `prepare` replaces it.

    The learning rate rises over the warm-up, and then falls in the plugin's `lr_decay_style` to its `min_lr`.

    Args:
        optimizer: The optimizer that it follows.
        total_num_steps: The updates after which the learning rate is at its end.
        warmup_num_steps: The updates of the warm-up.
        **kwargs: Refused.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        if kwargs:
            raise ConfigurationError(
                f"MegatronLMDummyScheduler does not know {', '.join(kwargs)}. Known: total_num_steps, warmup_num_steps."
            )
        check_count("warmup_num_steps", warmup_num_steps, at_least=0)
        if total_num_steps is not None:
            check_count("total_num_steps", total_num_steps, at_least=warmup_num_steps + 1)
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps

    def factor(self, step: int, shape: str, least: float) -> float:
        """Return the factor of the learning rate after some updates.

        Args:
            step: The number of updates.
            shape: "linear", "cosine" or "constant".
            least: The factor at the end.

        Example:
            >>> [MegatronLMDummyScheduler(None, 6, 2).factor(step, "linear", 0.5) for step in (0, 1, 2, 4, 9)]
            [0.0, 0.5, 1.0, 0.75, 0.5]
        """
        if step < self.warmup_num_steps:
            return step / self.warmup_num_steps
        if shape == "constant" or self.total_num_steps is None:
            return 1.0
        done = min((step - self.warmup_num_steps) / (self.total_num_steps - self.warmup_num_steps), 1.0)
        left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return least + (1 - least) * left
