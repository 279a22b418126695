"""Metrics from names, functions and objects."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, SignatureError
from trainer_lib.foundation.public_names.signatures import cannot_take, function_name, takes_targets_first
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.metric_adapters import ModuleMetric, object_metric, torch_collection
from trainer_lib.trainer.metrics.running_metrics import FunctionMetric, MeanMetric, named_metric

__all__ = ["EvaluationOutput", "FunctionMetric", "MeanMetric", "Metric", "as_metric", "as_metrics", "computed_metrics"]

_RESERVED = "loss"


def as_metrics(spec: Any) -> dict[str, Metric]:
    """Return the metrics of a mapping by name, of a list, or of a single metric.

    Without a given name, a metric takes the name of its function, class or module.

    Raises:
        ConfigurationError: If a value is not a metric, or two metrics have the same name.

    Example:
        >>> list(as_metrics(["accuracy", "top5_accuracy"])), list(as_metrics({"hits": "accuracy"}))
        (['accuracy', 'top5_accuracy'], ['hits'])
    """
    if spec is None:
        return {}
    if isinstance(spec, Mapping) and torch_collection(spec) is None:
        named = list(spec.items())
    else:
        is_list = isinstance(spec, Iterable) and not isinstance(spec, str) and not hasattr(spec, "compute")
        named = [(_default_name(value), value) for value in (spec if is_list else [spec])]
    metrics: dict[str, Metric] = {}
    for given_name, value in named:
        for name, single in _expand_collection(given_name, value):
            metric = as_metric(single, name)
            if name in metrics:
                raise ConfigurationError(
                    f"Two metrics have the name {name!r}. Give them names: metrics={{'name': metric, …}}."
                )
            metrics[name] = metric
    return metrics


def as_metric(value: Any, name: str) -> Metric:
    """Return a metric under a name.

    Args:
        value: The name of a known metric: "accuracy", "top5_accuracy" (or another number), "mse", "rmse", "mae",
            "perplexity", "f1", "precision", "recall" (also as "f1_macro", "f1_micro", "f1_weighted"), "auroc".
            An object with `update(predictions, labels)` and `compute()`, such as those of torchmetrics and torcheval;
            with `merge(others)` (or `merge_state`) each rank updates its own object, without it each rank updates with
            the batches of all. A metric of Hugging Face's evaluate, which gets classes where the model has scores. A
            function of predictions and labels that returns one value per row, or one number, which counts as the mean
            over the rows of its batch.
        name: The name of the metric's value, without a prefix.

    Raises:
        ConfigurationError: If the value is not a metric.
        SignatureError: If its function takes other arguments.

    Example:
        >>> metric = as_metric(lambda predictions, labels: (predictions - labels).abs(), "distance")
        >>> metric.begin(torch.device("cpu"))
        >>> metric.update(EvaluationOutput(predictions=torch.tensor([1.0, 4.0]), labels=torch.tensor([1.0, 2.0])))
        >>> metric.result([metric.state()])
        1.0
    """
    _check_name(name)
    if isinstance(value, Metric):
        value = copy.copy(value)
        value.name = name
        return value
    if isinstance(value, str):
        return named_metric(value, name)
    if isinstance(value, type):
        raise ConfigurationError(
            f"The metric {name!r} is the class {value.__name__}. Give an object: {value.__name__}(…)."
        )
    if _has(value, "add_batch", "compute"):
        return ModuleMetric(name, value)
    if _has(value, "update", "compute"):
        _check_call(name, value.update)
        return object_metric(name, value)
    if _has(value, "compute"):
        raise ConfigurationError(
            f"The metric {name!r} is a {type(value).__name__} with compute() and no update(predictions, labels). Give "
            "a metric that needs all predictions at once as compute_metrics."
        )
    if callable(value):
        _check_call(name, value)
        _check_order(name, value)
        return FunctionMetric(name, value)
    raise ConfigurationError(
        f"The metric {name!r} is a {type(value).__name__}. Give a name such as 'accuracy', a function of predictions "
        "and labels, or an object with update(predictions, labels) and compute()."
    )


def computed_metrics(function: Callable[..., Any]) -> Metric:
    """Return the metrics of a function of all predictions and labels, like Hugging Face's `compute_metrics`.

    The main process alone calls it, with an object that unpacks into predictions and labels (or with both, if it has
    two arguments), and all ranks get its results. The function names the metrics.
    """
    from trainer_lib.trainer.evaluation.prediction_results import ComputedMetrics

    return ComputedMetrics(function)


def _check_call(name: str, function: Callable[..., Any]) -> None:
    if (problem := cannot_take(function, "predictions", "labels")) is not None:
        raise SignatureError(
            f"The metric {name!r} is called with predictions and labels of a batch, but {function_name(function)}"
            f"{problem}. Give a function of two arguments, or a function of all rows at once as compute_metrics."
        )


def _check_order(name: str, function: Callable[..., Any]) -> None:
    if takes_targets_first(function):
        called = function_name(function) or "function"
        raise SignatureError(
            f"The metric {name!r} is called with predictions and labels of a batch, in this order, and {called} takes "
            "the labels first (y_true, y_pred). Give Trainer(compute_metrics=lambda prediction: "
            f"{{{name!r}: {called}(prediction.label_ids, prediction.predictions)}}), which gets all rows at once as "
            "arrays; classes are prediction.predictions.argmax(-1)."
        )


def _expand_collection(name: str, value: Any) -> list[tuple[str, Any]]:
    collection = torch_collection(value)
    return [(name, value)] if collection is None else list(collection.items())


def _default_name(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Metric):
        return value.name
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    if isinstance(name, str) and name.isidentifier():
        return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(value).__name__).lower()
    return words.removesuffix("_metric")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"The name of a metric must be a text that is not empty (got {name!r}).")
    if name == _RESERVED:
        raise ConfigurationError("The name 'loss' is taken by the evaluation loss. Give the metric another name.")


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
