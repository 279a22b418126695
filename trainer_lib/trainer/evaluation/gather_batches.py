"""This file is handing batches round: every process gets those of all, in the order of the dataset, a few at a time."""

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

_BYTES = 32 * 2**20  # of a process, that travel at once
_BATCHES = 64


class BatchGatherer:
    """Hands the batches of all processes to the metrics that take them.

    The processes meet each time that each of those who have more has gathered as many batches; nothing is kept beyond.

    Args:
        group: The processes.
        metrics: The metrics.
    """

    def __init__(self, group: ProcessGroup, metrics: Sequence[Metric]) -> None:
        self._group = group
        self._metrics = [metric for metric in metrics if metric.needs_all_rows]
        self._waiting: list[_Batch] = []
        self._at_once = 1  # until it is known how large they are

    def put(self, parts: Sequence[EvaluationOutput]) -> None:
        """Add what the step made of this process's next batch, in parts where it was split."""
        if not self._metrics:
            return
        self._waiting.append([[_compact(metric.select(part)) for metric in self._metrics] for part in parts])
        if len(self._waiting) == self._at_once:
            self._hand_round(is_through=False)

    def close(self, is_left: bool = False) -> None:
        """Hand round what is left here and on the others. All processes have to, after their last batch.

        Args:
            is_left: Whether that was not the last one, as this process leaves the evaluation.

        Raises:
            EvaluationInterrupted: On all processes, if one leaves it.
        """
        while self._metrics and not self._hand_round(is_through=True, is_left=is_left):
            pass

    def _hand_round(self, is_through: bool, is_left: bool = False) -> bool:
        """Return whether all processes are through."""
        own = _Parcel(self._waiting, is_through, _largest(self._waiting), is_left)
        parcels = self._exchanged(own)
        self._waiting = []
        if any(parcel.is_left for parcel in parcels):
            raise EvaluationInterrupted
        for index in range(max(len(parcel.batches) for parcel in parcels)):
            for parcel in parcels:
                if index < len(parcel.batches):
                    self._take(parcel.batches[index])
        largest = max(parcel.largest for parcel in parcels)
        self._at_once = min(max(_BYTES // max(largest, 1), 1), _BATCHES)
        return all(parcel.is_through for parcel in parcels)

    def _exchanged(self, own: "_Parcel") -> list["_Parcel"]:
        if self._group.size == 1:  # nothing has to leave the device
            return [own]
        packed = own._replace(batches=map_tensors(_Packed, own.batches))
        device = PartialState().device
        return [
            parcel._replace(batches=map_leaves(lambda leaf: _unpacked(leaf, device), parcel.batches))
            for parcel in self._group.all_gather_objects(packed)
        ]

    def _take(self, batch: "_Batch") -> None:
        for part in batch:
            for metric, selected in zip(self._metrics, part, strict=True):
                if not metric.main_process_only or self._group.rank == 0:
                    metric.update(selected)


# Of each part, what each metric selected.
_Batch = list[list[EvaluationOutput]]


class _Parcel(NamedTuple):
    """What a process hands round at once."""

    batches: list[_Batch]
    is_through: bool
    largest: int  # in bytes, of its batches
    is_left: bool  # the evaluation, by this process


class _Packed:
    """A tensor as its bytes: pickled as it is, a small one would take a hundred times as long."""

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
    # A view would take along all that it is a view of.
    return map_tensors(lambda t: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t.detach(), output)
