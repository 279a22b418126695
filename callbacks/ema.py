"""Exponential moving average of the weights, for evaluation and saving."""

from typing import Any

from trainer_lib.callbacks.weight_averaging import WeightAverage
from trainer_lib.events.trigger import callback_trigger
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.tensor_operations import foreach_lerp_


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights: `average = decay * average + (1 - decay) * weights`.

    Evaluations, predictions, the best metric and `save_model` use the average, and at the end of the run the model
    holds it. Until its first update (`every`), they use the model's own weights. A checkpoint contains both the weights
    and the average, so that a resumed run continues bit for bit.

    Args:
        decay: The weight of the old average, at least 0 and less than 1.
        warmup: Whether the decay starts low and rises, as (1 + n) / (10 + n) in update n, so that the initial weights
            lose their influence quickly.
        every: How often to update the average, such as "10 steps"; not an amount of time.
        buffers: Whether to average running statistics too; otherwise the model's own are used.

    Example:
        >>> ema = EMA(0.999, every="10 steps")
    """

    decay: float
    warmup: bool

    def __init__(self, decay: float = 0.999, warmup: bool = True, every: Any = 1, buffers: bool = False) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigurationError(f"EMA(decay) must be at least 0 and less than 1, such as 0.999 (got {decay!r}).")
        self.decay, self.warmup = decay, warmup
        super().__init__(callback_trigger(every, "EMA(every)", may_be_time=False), buffers)

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        foreach_lerp_(averages, weights, 1 - decay)
