"""Gathering batches of all ranks in the order of the dataset, a few at a time, for metrics that need all rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.foundation.pytree import leaves, map_leaves, map_tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.partial_state import PartialState
from trainer_lib.trainer.evaluation.interrupted_eval import EvaluationInterrupted
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric

_BYTES = 32 * 2**20  # how much a rank sends at once
_BATCHES = 64


class BatchGatherer:
    """Passes the batches of all ranks to the metrics that need all rows.

    The ranks exchange batches each time that each of them has collected as many as agreed, or has no more. Batches are
    dropped after the exchange.

    Args:
        group: The ranks that read different batches.
        metrics: The metrics.
        is_main: Whether this rank updates the metrics that only the main process updates.
    """

    def __init__(self, group: ProcessGroup, metrics: Sequence[Metric], is_main: bool) -> None:
        self._group, self._is_main = group, is_main
        self._metrics = [metric for metric in metrics if metric.needs_all_rows]
        self._waiting: list[_Batch] = []
        self._at_once = 1  # until the size of batches is known

    def add(self, parts: Sequence[EvaluationOutput]) -> None:
        """Add the outputs of this rank's next batch, several if the batch was split."""
        if not self._metrics:
            return
        batch = [[_compact(metric.select(part)) for metric in self._metrics] for part in parts]
        if self._group.size == 1:  # nothing to exchange
            self._update_metrics(batch)
            return
        self._waiting.append(batch)
        if len(self._waiting) == self._at_once:
            self._exchange(is_done=False)

    def close(self, is_interrupted: bool = False) -> None:
        """Exchange the remaining batches. All ranks must call it after their last batch.

        Args:
            is_interrupted: Whether this rank leaves the evaluation before its last batch.

        Raises:
            EvaluationInterrupted: On all ranks, if one leaves the evaluation.
        """
        while self._metrics and not self._exchange(is_done=True, is_interrupted=is_interrupted):
            pass

    def _exchange(self, is_done: bool, is_interrupted: bool = False) -> bool:
        """Exchange the waiting batches; return whether all ranks are done."""
        parcels = self._gathered(_Parcel(self._waiting, is_done, _largest(self._waiting), is_interrupted))
        self._waiting = []
        if any(parcel.is_interrupted for parcel in parcels):
            raise EvaluationInterrupted
        for index in range(max(len(parcel.batches) for parcel in parcels)):
            for parcel in parcels:
                if index < len(parcel.batches):
                    self._update_metrics(parcel.batches[index])
        largest = max(parcel.largest for parcel in parcels)
        self._at_once = min(max(_BYTES // max(largest, 1), 1), _BATCHES)
        return all(parcel.is_done for parcel in parcels)

    def _gathered(self, local: "_Parcel") -> list["_Parcel"]:
        if self._group.size == 1:  # nothing has to leave the device
            return [local]
        packed = local._replace(batches=map_tensors(_Packed, local.batches))
        device = PartialState().device
        return [
            parcel._replace(batches=map_leaves(lambda leaf: _unpacked(leaf, device), parcel.batches))
            for parcel in self._group.all_gather_objects(packed)
        ]

    def _update_metrics(self, batch: "_Batch") -> None:
        for part in batch:
            for metric, selected in zip(self._metrics, part, strict=True):
                if self._is_main or not metric.main_process_only:
                    metric.update(selected)


# For each part of a batch, the outputs that each metric selected.
_Batch = list[list[EvaluationOutput]]


class _Parcel(NamedTuple):
    """What a rank sends in one exchange."""

    batches: list[_Batch]
    is_done: bool  # whether this rank has no more batches
    largest: int  # the size of its largest batch, in bytes
    is_interrupted: bool  # whether this rank leaves the evaluation


class _Packed:
    """A tensor as its bytes: pickling a small tensor itself takes a hundred times as long."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.bytes = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _unpacked(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, _Packed):
        return leaf
    return torch.from_numpy(leaf.bytes).view(leaf.dtype).reshape(leaf.shape).to(device)


def _largest(batches: Sequence[_Batch]) -> int:
    return max((sum(_bytes(leaf) for leaf in leaves(batch, is_leaf=_is_texts)) for batch in batches), default=0)


def _bytes(leaf: Any) -> int:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.nbytes
    return 64 * len(leaf) if isinstance(leaf, (list, tuple)) else 0


def _is_texts(tree: Any) -> bool:
    return isinstance(tree, list) and bool(tree) and isinstance(tree[0], str) and holds_rows(tree)


def _compact(output: EvaluationOutput) -> EvaluationOutput:
    predictions, labels = map_tensors(_owned, output.predictions), map_tensors(_owned, output.labels)
    return EvaluationOutput(predictions=predictions, labels=labels, padding=output.padding)


def _owned(tensor: Tensor) -> Tensor:
    # A view would be pickled with the whole storage below it, and keep it in memory.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.detach()
