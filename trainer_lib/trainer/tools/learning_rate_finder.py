"""Finding a learning rate: some updates at increasing rates, and the loss at each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, NonFiniteError
from trainer_lib.foundation.imports import require
from trainer_lib.options.base import check_count, check_positive
from trainer_lib.trainer.fit.fit_run import fit
from trainer_lib.trainer.tools.sandbox import short_sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "find_learning_rate"
_FEWEST = 10  # updates, for a slope to be meaningful
_BESIDE = 3  # the neighbours on each side in the smoothing mean
_ENDS = 3  # the first and the last losses that are compared to detect divergence
_DIVERGED = 3.0  # the loss has diverged if it rises by this multiple of its first value


@dataclass(frozen=True, kw_only=True)
class LearningRateSweep:
    """The losses at increasing learning rates.

    Attributes:
        rates: The learning rates.
        losses: The loss at each rate, over all ranks, before the update with that rate.
        has_diverged: Whether the sweep ended because the loss diverged.

    Example:
        >>> rates = [10.0**power for power in range(-5, 5)]
        >>> losses = [2.0, 2.0, 2.0, 2.0, 1.6, 1.0, 0.8, 0.9, 2.0, 9.0]
        >>> LearningRateSweep(rates=rates, losses=losses).suggestion
        0.01
    """

    rates: list[float]
    losses: list[float]
    has_diverged: bool = False

    @property
    def smoothed(self) -> list[float]:
        """The losses, each averaged with up to three neighbours on each side."""
        return [
            float(np.mean(self.losses[max(0, place - _BESIDE) : place + _BESIDE + 1]))
            for place in range(len(self.losses))
        ]

    @property
    def suggestion(self) -> float | None:
        """The rate with the steepest fall of the smoothed loss over log(rate); `None` if the loss never falls.

        Only rates up to the lowest point of the smoothed loss count.
        """
        smoothed = np.array(self.smoothed)
        if len(smoothed) < 2:
            return None
        slopes = np.gradient(smoothed, np.log(self.rates))[: int(smoothed.argmin()) + 1]
        steepest = int(slopes.argmin())
        return self.rates[steepest] if slopes[steepest] < 0 else None

    def plot(self, axes: Any = None) -> Any:
        """Plot the losses over the rates, and return matplotlib's axes.

        Args:
            axes: The axes to draw on; by default those of a new figure.
        """
        require("matplotlib", "plot")
        from matplotlib import pyplot

        axes = pyplot.subplots()[1] if axes is None else axes
        axes.plot(self.rates, self.losses, alpha=0.4, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", color="grey", label=f"suggestion: {self.suggestion:.3g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        return axes

    def __str__(self) -> str:
        """Return the result in one line."""
        over = f"{len(self.rates)} updates, from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        end = ", where the loss diverged" if self.has_diverged else ""
        if self.suggestion is None:
            return f"no learning rate to suggest: the loss does not fall in {over}{end}"
        return f"learning rate {self.suggestion:.3g}: the steepest fall of the loss in {over}{end}"


def find_learning_rate(trainer: TrainerInterface, lowest: float, highest: float, updates: int) -> LearningRateSweep:
    """Sweep learning rates; see `Trainer.find_learning_rate`."""
    check_positive("lowest", lowest)
    check_positive("highest", highest)
    check_count("updates", updates, at_least=_FEWEST)
    if lowest >= highest:
        raise ConfigurationError(f"lowest={lowest} must be below highest={highest}.")
    sweep = _Sweep(np.geomspace(lowest, highest, updates).tolist())
    with short_sandbox(trainer, _TOOL, [sweep], max_steps=updates):
        try:
            fit(trainer)
        except NonFiniteError:
            if not sweep.losses:  # the learning rate did not cause it
                raise
            sweep.has_diverged = True
    if not sweep.losses:
        own_step = f"{type(trainer).__name__}.training_step returns none: return its LossResult"
        raise ConfigurationError(
            f"{_TOOL}() needs the loss, but "
            f"{own_step if trainer.parts.loss.has_own_step else 'all labels in the batches are ignored'}."
        )
    return LearningRateSweep(rates=sweep.used, losses=sweep.losses, has_diverged=sweep.has_diverged)


class _Sweep(Modifier):
    """Sets the learning rate of each update, and records its loss."""

    order = 1000  # after other callbacks that set the learning rate

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self._shares: list[float] = []
        self.used: list[float] = []
        self.losses: list[float] = []
        self.has_diverged = False

    def on_fit_begin(self, run: Run) -> None:
        if len(run.optimizers) > 1:
            raise ConfigurationError(
                f"{_TOOL}() needs a single optimizer, but there are {', '.join(run.optimizers)}. Sweep each model in a "
                "separate Trainer."
            )
        rates = [_rate(group) for group in run.optimizer.param_groups]
        # Groups with their own learning rates keep their ratio to the optimizer's rate.
        whole = float(run.optimizer.defaults.get("lr", 0.0)) or max(rates)
        self._shares = [rate / whole if whole else 1.0 for rate in rates]

    def on_step_begin(self, run: Run) -> None:
        rate = self._rates[run.state.step]
        for group, share in zip(run.optimizer.param_groups, self._shares, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if "loss" in values:  # otherwise all labels of the batch are ignored
            self.used.append(self._rates[run.state.step - 1])
            self.losses.append(values["loss"])
        if _is_lost(self.losses):
            self.has_diverged = True
            run.control.agree("stop")  # all ranks have the same loss, so all stop at the same step


def _rate(group: dict[str, Any]) -> float:
    if "lr" not in group:
        raise ConfigurationError(f"{_TOOL}() sets the learning rate, but the optimizer's groups have no 'lr'.")
    return float(group["lr"])


def _is_lost(losses: Sequence[float]) -> bool:
    """Whether the last losses are far above the first ones."""
    if len(losses) <= _ENDS:
        return False
    first, last = math.fsum(losses[:_ENDS]) / _ENDS, math.fsum(losses[-_ENDS:]) / _ENDS
    return last > first + _DIVERGED * abs(first)
