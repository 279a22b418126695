"""This file is the moving average of weights that a model is evaluated and saved with."""

from typing import Any

import torch

from trainer_lib.callbacks.weight_averaging import WeightAverage, interval
from trainer_lib.foundation.errors import ConfigurationError


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights: `average = decay * average + (1 - decay) * weights`.

    Evaluations, predictions, the search for the best and `save_model` use it, and at the end of the run the model has
    it. A checkpoint has the weights themselves and the average beside them, so that training goes on to the bit.

    Args:
        decay: How much of the average stays, from 0 up to 1.
        warmup: Whether the decay goes up at first, as (1 + n) / (10 + n) in update n, so that the weights that the
            run began with are soon forgotten.
        every: How often to average, such as "10 steps"; not an amount of time.
        buffers: Whether to average running statistics too; else the model's own are used.

    Example:
        >>> ema = EMA(0.999, every="10 steps")
    """

    def __init__(self, decay: float = 0.999, warmup: bool = True, every: Any = 1, buffers: bool = False) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigurationError(f"EMA(decay={decay!r}): give a number from 0 up to 1, such as 0.999.")
        self.decay, self.warmup = decay, warmup
        super().__init__(interval(every, "EMA(every)"), buffers)

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(averages, weights, 1 - decay)
