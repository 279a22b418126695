"""What a run evaluates: its sets, their metrics, how often, and which metric selects the best evaluation."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trainer_lib.events import Best
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.metric_names import greater_is_better_for
from trainer_lib.trainer.evaluation.eval_sets import EvaluatedTrainer, metrics_over_sets, named_sets, sets_at_intervals
from trainer_lib.trainer.metrics.measures import Measures, measures_by_set


class EvaluationPlan:
    """The evaluations of a trainer.

    Args:
        trainer: The arguments, the evaluation sets and their metrics.
    """

    def __init__(self, trainer: EvaluatedTrainer) -> None:
        self._trainer = trainer
        self._measures: Mapping[str, Measures] = self._made_measures()

    def measures(self, name: str) -> Measures:
        """Return the metrics of a set."""
        self._measures = self._measures or self._made_measures()
        return self._measures.get(name, self._measures[""])

    def forget_measures(self) -> None:
        """Let the next evaluation use the metrics that the trainer has then."""
        self._measures = {}

    def _made_measures(self) -> Mapping[str, Measures]:
        return measures_by_set(list(self.sets), self._trainer.metrics, self._trainer.compute_metrics)

    @property
    def sets(self) -> dict[str, Any]:
        """The evaluation sets by name; a single one is called ""."""
        return {} if self._trainer.eval_dataset is None else named_sets(self._trainer, self._trainer.eval_dataset)

    @property
    def at_intervals(self) -> list[str]:
        """The names of the sets that are evaluated at intervals during training."""
        return sets_at_intervals(self._trainer)

    @property
    def averaged_metrics(self) -> list[str]:
        """The metrics to average over the sets of the current evaluation."""
        return metrics_over_sets(self._trainer)

    @property
    def interval(self) -> Every | None:
        """The interval of evaluations during training; `None`: no evaluations. A set may have its own interval."""
        return None if self._trainer.eval_dataset is None else self._trainer.args.eval_interval

    @property
    def best_metric(self) -> str | None:
        """The metric that selects the best evaluation; `None` without evaluations."""
        if self._trainer.eval_dataset is None:
            return None
        metric = self._trainer.args.metric_for_best
        if metric is None:
            (first, *_) = sets_at_intervals(self._trainer) or self.sets
            return f"eval_{first}_loss" if first else "eval_loss"
        return metric if metric.startswith("eval_") else f"eval_{metric}"

    @property
    def greater_is_better(self) -> bool:
        """Whether a higher value of that metric is better.

        Raises:
            ConfigurationError: If neither the arguments nor the name say so.
        """
        return greater_is_better_for(self.best_metric or "", self._trainer.args.greater_is_better)

    def is_better(self, value: float, best: Best | None) -> bool:
        """Whether a value of that metric is better than the best one."""
        return best is None or (value > best.value if self.greater_is_better else value < best.value)

    def best_of(self, checkpoints: Iterable[Mapping[str, Any]]) -> Best | None:
        """Return the best evaluation of those that good checkpoints were saved with; `None` without one."""
        best, name = None, self.best_metric
        for entry in checkpoints if name is not None else ():
            value = float(entry["metrics"].get(name, math.nan))
            is_good = math.isfinite(value) and not entry.get("nonfinite")
            if is_good and self.is_better(value, best):
                best = Best(str(name), value, entry["step"])
        return best
