"""This file is the search for a learning rate: some updates at rates that rise, and what the loss makes of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, NonFiniteError
from trainer_lib.foundation.imports import require
from trainer_lib.options.base import check_count, check_positive
from trainer_lib.trainer.tools.sandbox import short_sandbox

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_TOOL = "find_learning_rate"
_FEWEST = 10  # updates, of which a slope can be told
_BESIDE = 3  # losses to each side that one is smoothed with
_ENDS = 3  # losses at the beginning, and at the end, that tell whether the loss has diverged
_DIVERGED = 3.0  # how many times what it was at first it has risen by


@dataclass(frozen=True, kw_only=True)
class LearningRateSweep:
    """What the loss made of rising learning rates.

    Attributes:
        rates: The learning rates.
        losses: The loss of the update that each was used for, over all processes, before that update.
        has_diverged: Whether the sweep ended because the loss was lost.

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
        """The losses, each as the mean with its three neighbours to each side, as far as there are any."""
        return [
            float(np.mean(self.losses[max(0, place - _BESIDE) : place + _BESIDE + 1]))
            for place in range(len(self.losses))
        ]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls steepest, over the logarithm of the rate; `None`: it never falls.

        Looked for up to the lowest point of the smoothed loss.
        """
        smoothed = np.array(self.smoothed)
        if len(smoothed) < 2:
            return None
        slopes = np.gradient(smoothed, np.log(self.rates))[: int(smoothed.argmin()) + 1]
        steepest = int(slopes.argmin())
        return self.rates[steepest] if slopes[steepest] < 0 else None

    def plot(self, axes: Any = None) -> Any:
        """Draw the losses over the rates, and return matplotlib's axes.

        Args:
            axes: Where to; by default in a new figure.
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
        """Return what was found, in a line."""
        over = f"{len(self.rates)} updates, from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        end = ", where the loss diverged" if self.has_diverged else ""
        if self.suggestion is None:
            return f"no learning rate to suggest: the loss does not fall in {over}{end}"
        return f"learning rate {self.suggestion:.3g}: there the loss falls steepest in {over}{end}"


def find_learning_rate(trainer: "Trainer", lowest: float, highest: float, updates: int) -> LearningRateSweep:
    """Do what `Trainer.find_learning_rate` says."""
    check_positive("lowest", lowest)
    check_positive("highest", highest)
    check_count("updates", updates, at_least=_FEWEST)
    if lowest >= highest:
        raise ConfigurationError(f"lowest={lowest} is not below highest={highest}, and the rates rise between them.")
    from trainer_lib.trainer.trainer import Trainer

    sweep = _Sweep(np.geomspace(lowest, highest, updates).tolist())
    with short_sandbox(trainer, _TOOL, [sweep], max_steps=updates):
        try:
            Trainer.fit(trainer)
        except NonFiniteError:
            if not sweep.losses:  # it is not the rate's fault
                raise
            sweep.has_diverged = True
    if not sweep.losses:
        own = f"{type(trainer).__name__}.training_step tells none: return the LossResult of what it differentiates"
        raise ConfigurationError(
            f"{_TOOL}() goes by the loss, and "
            f"{own if trainer.has_own_step else 'nothing in the batches counts for it: all labels are ignored'}."
        )
    return LearningRateSweep(rates=sweep.used, losses=sweep.losses, has_diverged=sweep.has_diverged)


class _Sweep(Modifier):
    """Sets the learning rate of each update, and keeps its loss."""

    order = 1000  # after whatever else sets a rate

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self._shares: list[float] = []
        self.used: list[float] = []
        self.losses: list[float] = []
        self.has_diverged = False

    def on_fit_begin(self, run: Run) -> None:
        if len(run.optimizers) > 1:
            raise ConfigurationError(
                f"{_TOOL}() looks for one learning rate, and there are optimizers {', '.join(run.optimizers)}. Sweep "
                "the model of each in a Trainer of its own."
            )
        rates = [_rate(group) for group in run.optimizer.param_groups]
        # Groups with rates of their own keep the ratio to the rate of the whole.
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
        if "loss" in values:  # else nothing in this batch counts
            self.used.append(self._rates[run.state.step - 1])
            self.losses.append(values["loss"])
        if _is_lost(self.losses):
            self.has_diverged = True
            run.control.agree("stop")  # all processes have the same loss, and come to it at the same step


def _rate(group: dict[str, Any]) -> float:
    if "lr" not in group:
        raise ConfigurationError(f"{_TOOL}() sets the learning rate, and this optimizer has none: no 'lr' in a group.")
    return float(group["lr"])


def _is_lost(losses: Sequence[float]) -> bool:
    """Whether the last losses are far above the first ones."""
    if len(losses) <= _ENDS:
        return False
    first, last = math.fsum(losses[:_ENDS]) / _ENDS, math.fsum(losses[-_ENDS:]) / _ENDS
    return last > first + _DIVERGED * abs(first)
