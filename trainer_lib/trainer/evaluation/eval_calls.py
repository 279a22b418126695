"""What `Trainer.evaluate` and `Trainer.predict` do: loaders and metrics of the sets, then the evaluation loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from trainer_lib.filesystem.remote_paths import local_path
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.logging import get_logger
from trainer_lib.trainer.changed_arguments import take_changes
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.checks.foreign_calls import check_attributes
from trainer_lib.trainer.data.eval_samplers import order_of
from trainer_lib.trainer.defaults import prepare_models
from trainer_lib.trainer.evaluation.eval_loop import NOTHING_MEASURED, EvaluationSet
from trainer_lib.trainer.evaluation.eval_sets import metrics_over_sets
from trainer_lib.trainer.evaluation.prediction_results import Predictions
from trainer_lib.trainer.safety.bad_samples import leave_out_while_evaluating
from trainer_lib.trainer.trainer_interface import TrainerInterface

_logger = get_logger(__name__)


def evaluate(trainer: TrainerInterface, dataset: Any, prefix: str, generation: Mapping[str, Any]) -> dict[str, float]:
    """Evaluate; see `Trainer.evaluate`."""
    if not isinstance(prefix, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"prefix must be a text, the prefix of the metrics' names (got {shown(prefix)}). Give inputs and labels as "
            "one dataset: evaluate((inputs, labels))."
        )
    is_default = dataset is None
    data, label = (trainer.eval_dataset, "eval_dataset") if is_default else (dataset, "evaluate(dataset)")
    if data is None:
        raise ConfigurationError("evaluate() needs data: Trainer(eval_dataset=…), or evaluate(dataset).")
    check_attributes(trainer)
    take_changes(trainer)
    loaders = before_fit.eval_loaders(trainer, data, label)
    models, evaluator = prepare_models(trainer), trainer.parts.evaluator
    sets = {name: _set(trainer, name, loader) for name, loader in loaders.items()}
    with attributes_kept([trainer.parts], ["generation_options"]):
        trainer.parts.generation_options = generation
        over_sets = metrics_over_sets(trainer)
        metrics = evaluator.evaluate(trainer.run, models.model_or_models, sets, prefix, over_sets)
    if not metrics:
        _logger.warning_once(NOTHING_MEASURED)
    return metrics


def predict(
    trainer: TrainerInterface, dataset: Any, to: str | Path | None, prefix: str, generation: Mapping[str, Any]
) -> Predictions:
    """Predict; see `Trainer.predict`."""
    check_attributes(trainer)
    take_changes(trainer)
    if dataset is None:
        raise ConfigurationError("predict() needs data: predict(dataset).")
    if to is not None and not isinstance(to, str) and not hasattr(to, "__fspath__"):
        raise ConfigurationError(
            f"to must be a folder to write the predictions to (got {shown(to)}). Give inputs and labels as one "
            "dataset: predict((inputs, labels))."
        )
    (loader,) = before_fit.eval_loaders(trainer, dataset, "predict(dataset)", is_one=True).values()
    models, evaluator = prepare_models(trainer), trainer.parts.evaluator
    prepared = evaluator.prepared(loader)
    target = None if to is None else local_path(to, "predict(to=…)")
    _, compute_metrics = trainer.parts.evaluation.measures("")
    with attributes_kept([trainer.parts], ["generation_options"]):
        trainer.parts.generation_options = generation
        return evaluator.predict(
            trainer.run,
            models.model_or_models,
            prepared,
            to=target,
            order=order_of(loader),
            prefix=prefix,
            compute_metrics=compute_metrics,
        )


def _set(trainer: TrainerInterface, name: str, loader: DataLoader[Any]) -> EvaluationSet:
    metrics, compute_metrics = trainer.parts.evaluation.measures(name)
    prepared = trainer.parts.evaluator.prepared(loader)
    leave_out_while_evaluating(trainer.args, prepared, trainer.accelerator.group)
    return EvaluationSet(loader=prepared, metrics=metrics, compute_metrics=compute_metrics, order=order_of(loader))
