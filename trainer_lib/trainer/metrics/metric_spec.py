"""This file is what may be given as a metric."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.evaluation.prediction_results import ComputedMetrics
from trainer_lib.trainer.metrics.metric_adapters import ModuleMetric, object_metric, torch_collection
from trainer_lib.trainer.metrics.running_metrics import FunctionMetric, MeanMetric, named_metric

__all__ = ["EvaluationOutput", "FunctionMetric", "MeanMetric", "Metric", "as_metric", "as_metrics", "computed_metrics"]

_TAKEN = "loss"


def as_metrics(given: Any) -> dict[str, Metric]:
    """Return the metrics for what was given: by name, or one after the other, or one alone.

    Without a name, a metric is called by its own: that of the function, the class or the module.

    Raises:
        ConfigurationError: If something in it is no metric, or two have one name.

    Example:
        >>> list(as_metrics(["accuracy", "top5_accuracy"])), list(as_metrics({"hits": "accuracy"}))
        (['accuracy', 'top5_accuracy'], ['hits'])
    """
    if given is None:
        return {}
    if isinstance(given, Mapping) and torch_collection(given) is None:
        named = list(given.items())
    else:
        several = isinstance(given, Iterable) and not isinstance(given, str) and not hasattr(given, "compute")
        named = [(_own_name(one), one) for one in (given if several else [given])]
    metrics: dict[str, Metric] = {}
    for name, thing in named:
        for own, one in _expanded(name, thing):
            metric = as_metric(one, own)
            if own in metrics:
                raise ConfigurationError(f"Two metrics are called {own!r}. Name them: metrics={{'name': metric, …}}.")
            metrics[own] = metric
    return metrics


def as_metric(thing: Any, name: str) -> Metric:
    """Return the metric for what was given under a name.

    Args:
        thing: The name of a known metric: "accuracy", "top5_accuracy" (or another number), "mse", "rmse", "mae",
            "perplexity", "f1", "precision", "recall" (also as "f1_macro", "f1_micro", "f1_weighted"), "auroc".
            An object with `update(predictions, labels)` and `compute()`, such as those of torchmetrics
            and torcheval; with `merge(others)` (or `merge_state`), each process has its own, without, each is updated
            with the batches of all. A metric of Hugging Face's evaluate, to which classes are given where the model
            has scores. A function of predictions and labels that returns one value a row, or one number, which
            counts as the mean over the rows of its batch.
        name: What its value is called, without a prefix.

    Raises:
        ConfigurationError: If it is no metric.

    Example:
        >>> metric = as_metric(lambda predictions, labels: (predictions - labels).abs(), "distance")
        >>> metric.begin(torch.device("cpu"))
        >>> metric.update(EvaluationOutput(predictions=torch.tensor([1.0, 4.0]), labels=torch.tensor([1.0, 2.0])))
        >>> metric.result([metric.state()])
        1.0
    """
    _check_name(name)
    if isinstance(thing, Metric):
        thing = copy.copy(thing)
        thing.name = name
        return thing
    if isinstance(thing, str):
        return named_metric(thing, name)
    if isinstance(thing, type):
        raise ConfigurationError(
            f"The metric {name!r} is the class {thing.__name__}. Give an object: {thing.__name__}(…)."
        )
    if _has(thing, "add_batch", "compute"):
        return ModuleMetric(name, thing)
    if _has(thing, "update", "compute"):
        return object_metric(name, thing)
    if _has(thing, "compute"):
        raise ConfigurationError(
            f"The metric {name!r} is a {type(thing).__name__} with compute() and no update(predictions, labels). What "
            "needs all predictions at once is given as compute_metrics."
        )
    if callable(thing):
        return FunctionMetric(name, thing)
    raise ConfigurationError(
        f"The metric {name!r} is a {type(thing).__name__}. Give a name such as 'accuracy', a function of predictions "
        "and labels, or an object with update(predictions, labels) and compute()."
    )


def computed_metrics(function: Callable[..., Any]) -> Metric:
    """Return the metrics that a function makes of all predictions and labels at once, as Hugging Face has them.

    It is called on the main process only, with an object that unpacks into predictions and labels (or with the two, if
    it has two arguments), and its results are the same on all. Being without a name, they go by their own.
    """
    return ComputedMetrics(function)


def _expanded(name: str, thing: Any) -> list[tuple[str, Any]]:
    collection = torch_collection(thing)
    return [(name, thing)] if collection is None else list(collection.items())


def _own_name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, Metric):
        return thing.name
    name = getattr(thing, "__name__", None) or getattr(thing, "name", None)
    if isinstance(name, str) and name.isidentifier():
        return name
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(thing).__name__).lower()
    return words.removesuffix("_metric")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"A metric's name must be a text, got {name!r}.")
    if name == _TAKEN:
        raise ConfigurationError("No metric can be called 'loss', as the loss is. Give it another name.")


def _has(thing: Any, *methods: str) -> bool:
    return all(callable(getattr(thing, method, None)) for method in methods)
