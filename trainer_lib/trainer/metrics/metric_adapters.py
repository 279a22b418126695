"""Adapters for metrics of torchmetrics, torcheval, evaluate and other libraries, reduced across ranks."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.foundation.tensors.pytree import map_tensors, send_to_device
from trainer_lib.logging import get_logger
from trainer_lib.trainer.data.batch_rows import as_array
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.running_metrics import chosen_classes

_logger = get_logger(__name__)

Merge = Callable[[Any, Sequence[Any]], None]


class ObjectMetric(Metric):
    """An object with `update(predictions, labels)` and `compute()`.

    If it can be merged, each rank updates its own object; if not, each rank updates with the batches of all ranks, in
    the order of the dataset.

    Args:
        name: The name of the metric.
        metric: The object. Its `reset()` resets it; without one each evaluation uses a fresh copy.
        merge: Merges other objects into the first.
    """

    def __init__(self, name: str, metric: Any, merge: Merge | None) -> None:
        super().__init__(name)
        self.needs_all_rows: bool = merge is None
        self._merge = merge
        self._has_reset = callable(getattr(metric, "reset", None))
        self._metric: Any = metric
        self._fresh: Any = None if self._has_reset else copy.deepcopy(metric)

    def begin(self, device: torch.device) -> None:
        """Reset the metric and move it to the device."""
        self._device = device
        if self._has_reset:
            self._metric.reset()
        else:
            self._metric = copy.deepcopy(self._fresh)
        if _is_movable(self._metric):
            self._metric.to(device)

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        self._metric.update(
            send_to_device(output.predictions, self._device), send_to_device(output.labels, self._device)
        )

    def state(self) -> Any:
        """Return the object for other ranks; `None` if each rank has all rows."""
        if self.needs_all_rows:
            return None
        # Other ranks cannot use tensors of this rank's device.
        return copy.deepcopy(self._metric).to("cpu") if _is_movable(self._metric) else self._metric

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value over all ranks."""
        if self._merge is None:
            return self._metric.compute()
        merged, *others = states
        if others:
            self._merge(merged, others)
        return merged.compute()


class ModuleMetric(Metric):
    """A metric of Hugging Face's evaluate, or several combined by its `combine`.

    The main process computes it from the rows of all ranks. If labels are whole numbers and predictions have one more
    dimension, of scores, the class with the highest score replaces them: these metrics compare classes.

    Args:
        name: The name of the metric.
        module: The metric.
    """

    needs_all_rows = True
    main_process_only = True

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        if (count := getattr(module, "num_process", 1)) > 1:
            raise ConfigurationError(
                f"The metric {name!r} must be loaded without num_process={count}: the trainer gathers the rows "
                "of all ranks, and the main process computes the metric."
            )
        self._module = module
        self._error = HeldError(name, DistributedOperationException)

    def begin(self, device: torch.device) -> None:
        """Reset the metric."""
        self._error = HeldError(self.name, DistributedOperationException)

    def select(self, output: EvaluationOutput) -> EvaluationOutput:
        """Return classes instead of scores, which are smaller to gather."""
        predictions, labels = output.predictions, output.labels
        if _are_scores(predictions, labels):
            predictions = chosen_classes(self.name, predictions, labels)
        return EvaluationOutput(predictions=predictions, labels=labels)

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        with self._error.held():
            self._module.add_batch(predictions=_as_arrays(output.predictions), references=_as_arrays(output.labels))

    def state(self) -> Any:
        """Return the computed value, or the error that computing raised."""
        value: Any = None
        with self._error.held():
            value = self._module.compute()
        return self._error.pack(value)

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value of the main process."""
        return self._error.unpack(states[0])


def object_metric(name: str, metric: Any) -> ObjectMetric:
    """Return the metric for an object with `update` and `compute`, merged across ranks if that is exact."""
    if (base := _torchmetrics_class()) is not None and isinstance(metric, base):
        return TorchMetric(name, metric, _merge_torchmetric if _merges_exactly(metric, base) else None)
    merge = next((method for method in ("merge", "merge_state") if callable(getattr(metric, method, None))), None)
    if merge is None or not _can_pickle(metric):
        return ObjectMetric(name, metric, None)
    return ObjectMetric(name, metric, lambda target, others: getattr(target, merge)(list(others)))


class TorchMetric(ObjectMetric):
    """A metric of torchmetrics; this class merges ranks instead of torchmetrics' own synchronization."""

    def begin(self, device: torch.device) -> None:
        """Reset the metric and move it to the device."""
        super().begin(device)
        for module in self._metric.modules():
            if hasattr(module, "distributed_available_fn"):
                module.distributed_available_fn = _never_available

    def state(self) -> Any:
        """Return the metric's state; other ranks may not be able to import its class."""
        return None if self.needs_all_rows else dict(self._metric.metric_state)

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value over all ranks."""
        if self._merge is None:
            return self._numbers(self._metric.compute())
        merged = copy.deepcopy(self._metric)
        for name, value in states[0].items():
            setattr(merged, name, value)
        merged._update_count = len(states)  # prevents a warning if this rank had no batch
        self._merge(merged, states[1:])
        return self._numbers(merged.compute())

    def _numbers(self, value: Any) -> Any:
        """Return a value without those of its parts that are no numbers, such as the list of classes."""
        if not isinstance(value, dict):
            return value
        parts: dict[str, Any] = value
        numbers = {key: part for key, part in parts.items() if getattr(part, "numel", _one)() == 1}
        if numbers and (left_out := [repr(key) for key in parts if key not in numbers]):
            _logger.warning_once(
                f"The metric {self.name!r} returned {', '.join(left_out)} with several values, or none, which are left "
                "out. To log them, give a subclass whose compute() returns numbers by name."
            )
        return numbers or parts


def _one() -> int:
    return 1


def torch_collection(value: Any) -> dict[str, Any] | None:
    """Return the metrics of a `MetricCollection` of torchmetrics by name; `None` for any other value."""
    if _torchmetrics_class() is None:
        return None
    from torchmetrics import MetricCollection

    return dict(value.items()) if isinstance(value, MetricCollection) else None


def _never_available() -> bool:
    return False


def _torchmetrics_class() -> Any:
    import sys

    # A user who passes one of its metrics has imported it.
    module = sys.modules.get("torchmetrics")
    return None if module is None else module.Metric


def _merges_exactly(metric: Any, base: Any) -> bool:
    """Whether merging a metric of torchmetrics is exact; it is not for means and for wrappers of other metrics."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    if type(metric).merge_state is not base.merge_state:
        return True
    reductions = list(metric._reductions.values())
    has_no_parts = sum(isinstance(module, base) for module in metric.modules()) == 1
    exact = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)
    return (
        metric.full_state_update is False
        and not metric.dist_sync_on_step
        and has_no_parts
        and bool(reductions)
        and all(reduction in exact for reduction in reductions)
    )


def _merge_torchmetric(target: Any, others: Sequence[Any]) -> None:
    for other in others:
        target.merge_state(other)


def _can_pickle(metric: Any) -> bool:
    """Whether an object can be sent to other ranks: pickle does not find classes defined inside functions."""
    try:
        pickle.dumps(metric)
    except Exception:  # noqa: BLE001 - pickling runs the object's code
        return False
    return True


def _is_movable(metric: Any) -> bool:
    if isinstance(metric, nn.Module):
        return True
    # Metrics of torcheval; `to` of other classes may have another meaning.
    return callable(getattr(metric, "to", None)) and hasattr(metric, "device")


def _are_scores(predictions: Any, labels: Any) -> bool:
    if not isinstance(predictions, Tensor) or not isinstance(labels, Tensor):
        return False
    return predictions.ndim == labels.ndim + 1 and predictions.is_floating_point() and not labels.is_floating_point()


def _as_arrays(tree: Any) -> Any:
    return map_tensors(as_array, tree)
