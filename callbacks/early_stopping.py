"""Early stopping: ends a run when a metric stops improving, is good enough, or diverges."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import greater_is_better_for, read_metric


class EarlyStopping(Callback):
    """Ends training based on an evaluation metric; `run.control.reason` holds the reason.

    Evaluations outside training do not count, and neither do evaluations that leave out the dataset of `metric`.

    Args:
        metric: The name of the evaluation metric.
        patience: Stop after this many evaluations in a row without improvement; `None` never stops for that reason.
        min_delta: The smallest change that counts as an improvement.
        greater_is_better: Whether higher is better; `None` infers it from the metric's name.
        stop_above: Stop when the metric exceeds this value: good enough.
        stop_below: Stop when the metric falls below this value: good enough.
        diverged_above: Stop when the metric exceeds this value: diverged.
        diverged_below: Stop when the metric falls below this value: diverged.
        check_finite: Stop when the metric is NaN or infinite.

    Example:
        >>> from trainer_lib.events import RunState
        >>> stopping = EarlyStopping("eval_accuracy", patience=2, stop_above=0.99)
        >>> run = Run(state=RunState(status="running"))
        >>> for accuracy in (0.7, 0.8, 0.75, 0.79):
        ...     stopping.on_evaluate_end(run, {"eval_accuracy": accuracy})
        >>> run.control.stop, run.control.reason
        (True, 'eval_accuracy was not better than 0.8 in 2 evaluations')
    """

    metric: str
    min_delta: float
    patience: int | None
    bad_evaluations: int

    needs_evaluation: ClassVar[bool] = True

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int | None = 3,
        min_delta: float = 0.0,
        greater_is_better: bool | None = None,
        *,
        stop_above: float | None = None,
        stop_below: float | None = None,
        diverged_above: float | None = None,
        diverged_below: float | None = None,
        check_finite: bool = True,
    ) -> None:
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ConfigurationError(
                f"patience must be a number of evaluations, 1 or more, or None (got {patience!r})."
            )
        if not 0 <= min_delta < math.inf:
            raise ConfigurationError(f"min_delta must be finite and at least 0 (got {min_delta!r}).")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.key: str | None = f"EarlyStopping({metric})"
        self.sign = 1 if greater_is_better_for(metric, greater_is_better) else -1
        self.reached: tuple[float | None, float | None] = (stop_above, stop_below)
        self.diverged: tuple[float | None, float | None] = (diverged_above, diverged_below)
        self.check_finite = check_finite
        self.best: float | None = None
        self.bad_evaluations = 0

    @property
    def monitored_metric(self) -> str:
        return self.metric

    def on_fit_begin(self, run: Run) -> None:
        if not run.state.step:  # no resumed run: the object may have been part of another run
            self.best, self.bad_evaluations = None, 0

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status != "running" or run.leaves_out(self.metric):
            return
        reason = self._judge(read_metric(self.metric, metrics, "EarlyStopping"))
        if reason is not None:
            run.control.reason = reason
            run.control.stop = True

    def _judge(self, value: float) -> str | None:
        """Record a value, and return the reason to stop; `None` if training continues."""
        if math.isfinite(value) and (self.best is None or self.sign * (value - self.best) > self.min_delta):
            self.best, self.bad_evaluations = value, 0
        else:
            self.bad_evaluations += 1
        if self.check_finite and not math.isfinite(value):
            return f"{self.metric} is {value}"
        if limit := _beyond(value, self.diverged):
            return f"{self.metric} diverged: {value:.6g} is {limit}"
        if limit := _beyond(value, self.reached):
            return f"{self.metric} is good enough: {value:.6g} is {limit}"
        if self.patience is not None and self.bad_evaluations >= self.patience:
            than = "" if self.best is None else f" better than {self.best:.6g}"
            return f"{self.metric} was not{than or ' finite'} in {self.bad_evaluations} evaluations"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_evaluations": self.bad_evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.bad_evaluations = state["best"], state["bad_evaluations"]


def _beyond(value: float, limits: tuple[float | None, float | None]) -> str | None:
    above, below = limits
    if above is not None and value > above:
        return f"above {above:g}"
    if below is not None and value < below:
        return f"below {below:g}"
    return None
