"""This file is metrics that are objects of others: updated by batch, merged over the processes, and computed."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.foundation.pytree import map_tensors, send_to_device
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.running_metrics import chosen_classes

Merge = Callable[[Any, Sequence[Any]], None]


class ObjectMetric(Metric):
    """An object with `update(predictions, labels)` and `compute()`.

    With a way to merge it, each process updates its own; without, each updates with the batches of all, in the order of
    the dataset.

    Args:
        name: Its name.
        thing: The object. It is started over by its `reset()`; without one, a copy of it as it is now is used.
        merge: Merges others into one.
    """

    def __init__(self, name: str, thing: Any, merge: Merge | None) -> None:
        super().__init__(name)
        self.needs_all_rows = merge is None
        self._merge = merge
        self._has_reset = callable(getattr(thing, "reset", None))
        self._metric: Any = thing
        self._fresh: Any = None if self._has_reset else copy.deepcopy(thing)

    def begin(self, device: torch.device) -> None:
        """Start over, on the device."""
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
        """Return the object, where it has to travel."""
        if self.needs_all_rows:
            return None
        # Tensors of a device are of no use to a process that has another one.
        return copy.deepcopy(self._metric).to("cpu") if _is_movable(self._metric) else self._metric

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value, of all processes."""
        if self._merge is None:
            return self._metric.compute()
        whole, *others = states
        if others:
            self._merge(whole, others)
        return whole.compute()


class ModuleMetric(Metric):
    """A metric of Hugging Face's evaluate, or several that `combine` put together.

    The main process computes it, of the rows of all processes. Where labels are whole numbers and predictions have one
    dimension more, of scores, they are replaced by the class with the highest score: these metrics compare classes.

    Args:
        name: Its name.
        module: The metric.
    """

    needs_all_rows = True
    main_process_only = True

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        if (count := getattr(module, "num_process", 1)) > 1:
            raise ConfigurationError(
                f"The metric {name!r} was loaded with num_process={count}, to put processes together through files. "
                "Load it without: rows come to the main process, which computes it."
            )
        self._module = module
        self._error = HeldError(name, DistributedOperationException)

    def begin(self, device: torch.device) -> None:
        """Start over."""
        self._error = HeldError(self.name, DistributedOperationException)

    def select(self, output: EvaluationOutput) -> EvaluationOutput:
        """Return classes in the place of scores, so that less has to travel."""
        predictions, labels = output.predictions, output.labels
        if _are_scores(predictions, labels):
            predictions = chosen_classes(self.name, predictions, labels)
        return EvaluationOutput(predictions=predictions, labels=labels)

    def update(self, output: EvaluationOutput) -> None:
        """Add a batch."""
        with self._error.held():
            self._module.add_batch(predictions=_as_arrays(output.predictions), references=_as_arrays(output.labels))

    def state(self) -> Any:
        """Return what came out."""
        value: Any = None
        with self._error.held():
            value = self._module.compute()
        return self._error.pack(value)

    def result(self, states: Sequence[Any]) -> Any:
        """Return what came out on the main process."""
        return self._error.unpack(states[0])


def object_metric(name: str, thing: Any) -> ObjectMetric:
    """Return the metric for an object with `update` and `compute`, in the way in which it can be merged exactly."""
    if (own := _torchmetrics_class()) is not None and isinstance(thing, own):
        return TorchMetric(name, thing, _merge_torchmetric if _merges_exactly(thing, own) else None)
    merge = next((m for m in ("merge", "merge_state") if callable(getattr(thing, m, None))), None)
    if merge is None or not _can_travel(thing):
        return ObjectMetric(name, thing, None)
    return ObjectMetric(name, thing, lambda one, others: getattr(one, merge)(list(others)))


class TorchMetric(ObjectMetric):
    """A metric of torchmetrics, which would put processes together by itself when it computes: that is done here."""

    def begin(self, device: torch.device) -> None:
        """Start over, on the device."""
        super().begin(device)
        for module in self._metric.modules():
            if hasattr(module, "distributed_available_fn"):
                module.distributed_available_fn = _never_available

    def state(self) -> Any:
        """Return what it has counted; the object itself may be of a class that others do not find."""
        return None if self.needs_all_rows else dict(self._metric.metric_state)

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value, of all processes."""
        if self._merge is None:
            return self._metric.compute()
        whole = copy.deepcopy(self._metric)
        for name, value in states[0].items():
            setattr(whole, name, value)
        whole._update_count = len(states)  # it would warn where this process had no batch
        self._merge(whole, states[1:])
        return whole.compute()


def torch_collection(thing: Any) -> dict[str, Any] | None:
    """Return the metrics of a `MetricCollection` of torchmetrics by name, or `None` if it is none."""
    if _torchmetrics_class() is None:
        return None
    from torchmetrics import MetricCollection

    return dict(thing.items()) if isinstance(thing, MetricCollection) else None


def _never_available() -> bool:
    return False


def _torchmetrics_class() -> Any:
    import sys

    # Nobody can give one who has not imported it.
    module = sys.modules.get("torchmetrics")
    return None if module is None else module.Metric


def _merges_exactly(metric: Any, own: Any) -> bool:
    """Whether a metric of torchmetrics is the sum of its parts; means, and what a wrapper hides, are not."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    if type(metric).merge_state is not own.merge_state:
        return True
    reductions = list(metric._reductions.values())
    is_alone = sum(isinstance(module, own) for module in metric.modules()) == 1
    exact = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)
    return (
        metric.full_state_update is False
        and not metric.dist_sync_on_step
        and is_alone
        and bool(reductions)
        and all(reduction in exact for reduction in reductions)
    )


def _merge_torchmetric(one: Any, others: Sequence[Any]) -> None:
    for other in others:
        one.merge_state(other)


def _can_travel(metric: Any) -> bool:
    """Whether an object can be sent: its class may be one that only this script, or this function, knows."""
    try:
        pickle.dumps(metric)
    except Exception:  # noqa: BLE001 - whatever pickling calls
        return False
    return True


def _is_movable(metric: Any) -> bool:
    if isinstance(metric, nn.Module):
        return True
    # As torcheval's; others' `to` may mean anything.
    return callable(getattr(metric, "to", None)) and hasattr(metric, "device")


def _are_scores(predictions: Any, labels: Any) -> bool:
    if not isinstance(predictions, Tensor) or not isinstance(labels, Tensor):
        return False
    return predictions.ndim == labels.ndim + 1 and predictions.is_floating_point() and not labels.is_floating_point()


def _as_arrays(tree: Any) -> Any:
    return map_tensors(as_array, tree)


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; numpy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
