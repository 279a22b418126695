"""Metrics of training batches, averaged over batches, steps and ranks between two logs."""

from typing import Any

import torch

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.losses.model_io import predictions_of
from trainer_lib.trainer.metrics.metric_spec import as_metrics
from trainer_lib.trainer.metrics.running_metrics import FunctionMetric, MeanMetric

_logger = get_logger(__name__)


class TrainingMetrics(Callback):
    """Measures the model's outputs for each training batch, before its update, without waiting for the device.

    Args:
        metrics: Metrics that are means over labels or rows, as in `Trainer(metrics=…)`.

    Raises:
        ConfigurationError: If a metric is not a mean, such as "f1".
    """

    def __init__(self, metrics: Any) -> None:
        self._metrics: list[MeanMetric | FunctionMetric] = []
        for name, metric in as_metrics(metrics).items():
            if not isinstance(metric, (MeanMetric, FunctionMetric)):
                raise ConfigurationError(
                    f"train_metrics has {name!r}, which is not a mean over labels or rows. Give it as metrics=…, for "
                    "evaluations; means such as 'accuracy' and functions of predictions and labels go here."
                )
            self._metrics.append(metric)

    def on_fit_begin(self, run: Run) -> None:
        """Reset the metrics on the device of the batches."""
        means = run.trainer.parts.means
        functions = [metric.name for metric in self._metrics if isinstance(metric, FunctionMetric)]
        if functions and run.accelerator.sequence_split.ranks is not None:
            raise ConfigurationError(
                f"train_metrics: the function {functions[0]!r} measures rows, of which a rank has parts with cp_size "
                "or sp_size. Give it as metrics=…, for evaluations, which have whole rows, or set both to 1."
            )
        for metric in self._metrics:
            metric.begin(run.accelerator.device)
            if isinstance(metric, MeanMetric):
                means.finishes[metric.name] = metric.finish

    def on_micro_batch_end(self, run: Run) -> None:
        """Add a batch to the means."""
        self.measure(run)

    def measure(self, run: Run) -> None:
        """Add the outputs of now to the means."""
        if run.outputs is None:
            _logger.warning_once(
                "train_metrics: the training step returned no outputs, so there is nothing to measure."
            )
            return
        loss = run.trainer.parts.loss
        (batch,), _ = run.trainer.parts.batches.of_window(run.model, [run.batch])
        labels = loss.labels(batch)
        output = EvaluationOutput(
            run.loss_sum,
            run.weight,
            predictions_of(run.outputs),
            labels,
            ignored_label=loss.ignored_label,
            shifted_labels=loss.shifted_labels(batch, labels),
        )
        for metric in self._metrics:
            for name, (total, weight) in metric.measured(output).items():
                run.trainer.parts.means.add_sum(name, total, weight)


class TrainingMetricsOfParts(TrainingMetrics):
    """Measures each part of a batch that is computed in parts, as `per_device_train_batch_size="auto"` does.

    A batch in parts has no outputs of its own. Parts that are computed again count once: what an update that runs out
    of memory added to the means is taken back.
    """

    def on_micro_batch_end(self, run: Run) -> None:
        """Do nothing: its parts are measured."""

    def on_loss(self, run: Run) -> None:
        """Add a part to the means, unless it only takes part in the update."""
        if not (run.weighs_nothing or run.control.skip_batch):
            with torch.no_grad():
                self.measure(run)
