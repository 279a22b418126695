"""The metrics of each evaluation set, from what a trainer is given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_lib.foundation.errors import ConfigurationError, SignatureError, did_you_mean
from trainer_lib.foundation.public_names.signatures import cannot_take, function_name
from trainer_lib.trainer.evaluation.outputs import Metric


class Measures(NamedTuple):
    """The metrics of an evaluation set."""

    metrics: Mapping[str, Metric]
    compute: Callable[..., Any] | None


def measures_by_set(names: Sequence[str], metrics: Any, compute_metrics: Any) -> dict[str, Measures]:
    """Return the metrics of each set, and under "" those of any other set.

    Raises:
        ConfigurationError: If metrics are given for an unknown set, or a metric is invalid.
        SignatureError: If a function takes other arguments.
    """
    if isinstance(compute_metrics, Mapping):
        foreign = [name for name in compute_metrics if name not in names]
        if foreign:
            raise ConfigurationError(
                f"compute_metrics is given for a set {foreign[0]!r}, and the sets are {', '.join(names) or 'none'}."
                f"{did_you_mean(foreign[0], names)}"
            )
    elif compute_metrics is not None and not callable(compute_metrics):
        raise ConfigurationError(f"compute_metrics must be a function, got a {type(compute_metrics).__name__}.")
    for function in compute_metrics.values() if isinstance(compute_metrics, Mapping) else [compute_metrics]:
        _check_compute_metrics(function)
    differs = _is_by_set(metrics, names)
    of_all = _metrics_of(None if differs else metrics)
    by_name = compute_metrics if isinstance(compute_metrics, Mapping) else dict.fromkeys(("", *names), compute_metrics)
    return {
        name: Measures(_metrics_of(metrics.get(name)) if differs else of_all, by_name.get(name))
        for name in ("", *names)
    }


def _metrics_of(spec: Any) -> dict[str, Metric]:
    if spec is None:
        return {}
    from trainer_lib.trainer.metrics.metric_spec import as_metrics

    return as_metrics(spec)


def _check_compute_metrics(function: Any) -> None:
    if not callable(function) or cannot_take(function, "predictions", "labels") is None:
        return
    if (problem := cannot_take(function, "prediction")) is not None:
        raise SignatureError(
            "compute_metrics is called with one argument, which unpacks into predictions and labels (or with both), "
            f"but {function_name(function)}{problem}. Bind its other arguments by functools.partial."
        )


def _is_by_set(metrics: Any, names: Sequence[str]) -> bool:
    return isinstance(metrics, Mapping) and bool(metrics) and names != [""] and set(metrics) <= set(names)
