"""A schedule that lowers the learning rate when a metric stops improving."""

import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_choice, check_count


class PlateauSchedule(LRScheduler):
    """Lowers the learning rate when a metric stops improving, like torch's `ReduceLROnPlateau`, with a warm-up.

    `step()` counts an update, `step(value)` takes the metric of an evaluation.

    Args:
        optimizer: The optimizer.
        warmup_steps: Updates in which the rate rises from 0.
        mode: Whether a lower metric is better ("min") or a higher one ("max").
        factor: The factor of each reduction.
        patience: Evaluations in a row without improvement before a reduction.
        threshold: The smallest change that counts as an improvement.
        threshold_mode: Whether the threshold is a fraction of the best value ("rel") or a difference ("abs").
        cooldown: Evaluations to ignore after a reduction.
        min_lr: The lowest rate.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> schedule = PlateauSchedule(optimizer, patience=1, factor=0.5)
        >>> for loss in (3.0, 2.0, 2.0, 2.0):
        ...     schedule.step(loss)
        >>> schedule.get_last_lr()
        [0.5]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        *,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        check_choice("mode", mode, ("min", "max"))
        check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        check_count("patience", patience, at_least=0)
        check_count("cooldown", cooldown, at_least=0)
        for name, value, top in (
            ("factor", factor, 1.0),
            ("threshold", threshold, math.inf),
            ("min_lr", min_lr, math.inf),
        ):
            if not 0 <= value < top:
                raise ConfigurationError(f"{name} must be at least 0 and below {top:g} (got {shown(value)}).")
        self._warmup, self._sign = warmup_steps, 1.0 if mode == "min" else -1.0
        self._factor, self._patience, self._cooldown, self._min_lr = factor, patience, cooldown, min_lr
        self._threshold, self._is_relative = threshold, threshold_mode == "rel"
        self._scale, self._best, self._bad, self._cooling = 1.0, math.inf, 0, 0
        super().__init__(optimizer)

    def step(self, metric: float | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Count an update, or take the metric of an evaluation."""
        if metric is None:
            super().step()
            return
        self._record(self._sign * float(metric))
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = self.get_lr()

    def get_lr(self) -> list[Any]:
        """Return the rates of the groups."""
        return [self.rate_at(self.last_epoch, group) for group in range(len(self.base_lrs))]

    def rate_at(self, step: int, group: int = 0) -> float:
        """Return the rate of a group after `step` updates, at the present reduction."""
        base = float(self.base_lrs[group])
        warm = min(1.0, step / self._warmup) if self._warmup else 1.0
        return warm * min(base, max(base * self._scale, self._min_lr))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule; its settings come from the arguments, also after a restart."""
        return {name: getattr(self, name) for name in _STATE}

    def _record(self, value: float) -> None:
        """Record a value, of which lower is better."""
        goal = self._best
        if goal < math.inf:
            goal -= self._threshold * (abs(goal) if self._is_relative else 1.0)
        if value < goal:
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self._patience:
            self._scale, self._cooling, self._bad = self._scale * self._factor, self._cooldown, 0


_STATE = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_scale", "_best", "_bad", "_cooling")
