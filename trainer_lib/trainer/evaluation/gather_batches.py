"""Gathering batches of all ranks in the order of the dataset, a few at a time, for metrics that need all rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.foundation.tensors.pytree import leaves, map_leaves, map_tensors
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
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
        parcels: list[_Parcel] = self._group.all_gather_objects(_Parcel(_pack(self._waiting), is_done, is_interrupted))
        self._waiting = []
        if any(parcel.is_interrupted for parcel in parcels):
            raise EvaluationInterrupted
        device = PartialState().device
        by_rank = [_unpack(parcel.packed, device) for parcel in parcels]
        for index in range(max(map(len, by_rank))):
            for batches in by_rank:
                if index < len(batches):
                    self._update_metrics(batches[index])
        largest = max(parcel.packed.largest for parcel in parcels)
        self._at_once = min(max(_BYTES // max(largest, 1), 1), _BATCHES)
        return all(parcel.is_done for parcel in parcels)

    def _update_metrics(self, batch: "_Batch") -> None:
        for part in batch:
            for metric, selected in zip(self._metrics, part, strict=True):
                if self._is_main or not metric.main_process_only:
                    metric.update(selected)


# For each part of a batch, the outputs that each metric selected.
_Batch = list[list[EvaluationOutput]]


class _Place:
    """Where a tensor was: the next rows of one of the joined tensors."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Joined(NamedTuple):
    """Tensors of the same type and row size, joined, as bytes: pickling each takes a hundred times as long."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: list[int]  # of each tensor
    is_scalar: bool  # whether they have no dimension for rows
    bytes: np.ndarray[Any, Any]


class _Packed(NamedTuple):
    """Batches with places instead of tensors, and the tensors."""

    batches: list[list[list[tuple[Any, Any, int]]]]  # predictions, labels and padding of each output
    joined: list[_Joined]
    largest: int  # the size of the largest batch, in bytes


class _Parcel(NamedTuple):
    """What a rank sends in one exchange."""

    packed: _Packed
    is_done: bool  # whether this rank has no more batches
    is_interrupted: bool  # whether this rank leaves the evaluation


class _Packing:
    """Replaces tensors by places, and joins them."""

    def __init__(self) -> None:
        self._groups: dict[Any, tuple[_Place, list[Tensor]]] = {}
        self.bytes = 0

    def place(self, tensor: Tensor) -> _Place:
        """Return the place of a tensor."""
        self.bytes += tensor.nbytes
        key = tensor.device, tensor.dtype, tensor.shape[1:], tensor.ndim == 0
        if key not in self._groups:
            self._groups[key] = _Place(len(self._groups)), []
        place, tensors = self._groups[key]
        tensors.append(tensor)
        return place

    def joined(self) -> list[_Joined]:
        """Return the tensors."""
        return [_joined(tensors) for _, tensors in self._groups.values()]


def _pack(batches: Sequence[_Batch]) -> _Packed:
    packing, largest, skeletons = _Packing(), 0, list[list[list[tuple[Any, Any, int]]]]()
    for batch in batches:
        before = packing.bytes
        skeletons.append([[_placed(output, packing) for output in part] for part in batch])
        texts = sum(_bytes_of_texts(tree) for part in batch for output in part for tree in _trees(output))
        largest = max(largest, packing.bytes - before + texts)
    return _Packed(skeletons, packing.joined(), largest)


def _placed(output: EvaluationOutput, packing: _Packing) -> tuple[Any, Any, int]:
    predictions, labels = (map_tensors(packing.place, tree) for tree in _trees(output))
    return predictions, labels, output.padding


def _joined(tensors: list[Tensor]) -> _Joined:
    is_scalar = tensors[0].ndim == 0
    whole = (torch.stack(tensors) if is_scalar else torch.cat(tensors)).detach().cpu()
    rows = [1 if is_scalar else len(tensor) for tensor in tensors]
    return _Joined(whole.dtype, tuple(whole.shape), rows, is_scalar, as_bytes(whole).numpy())


def _unpack(packed: _Packed, device: torch.device) -> list[_Batch]:
    sources = [_separated(joined, device) for joined in packed.joined]

    def filled(leaf: Any) -> Any:
        return next(sources[leaf.number]) if type(leaf) is _Place else leaf

    def output(predictions: Any, labels: Any, padding: int) -> EvaluationOutput:
        predictions, labels = map_leaves(filled, predictions, _is_place), map_leaves(filled, labels, _is_place)
        return EvaluationOutput(predictions=predictions, labels=labels, padding=padding)

    return [[[output(*parts) for parts in part] for part in batch] for batch in packed.batches]


def _separated(joined: _Joined, device: torch.device) -> Iterator[Tensor]:
    whole = torch.from_numpy(joined.bytes).view(joined.dtype).reshape(joined.shape).to(device)
    return iter(whole.unbind() if joined.is_scalar else whole.split(joined.rows))


def _is_place(tree: Any) -> bool:
    return type(tree) is _Place


def _trees(output: EvaluationOutput) -> tuple[Any, Any]:
    return output.predictions, output.labels


def _bytes_of_texts(tree: Any) -> int:
    if tree is None or type(tree) is Tensor:
        return 0
    return sum(_bytes(leaf) for leaf in leaves(tree, is_leaf=_is_texts))


def _bytes(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return 64 * len(leaf) if isinstance(leaf, (list, tuple)) else 0


def _is_texts(tree: Any) -> bool:
    return isinstance(tree, list) and bool(tree) and isinstance(tree[0], str) and holds_rows(tree)


def _compact(output: EvaluationOutput) -> EvaluationOutput:
    predictions, labels = map_tensors(_owned, output.predictions), map_tensors(_owned, output.labels)
    return EvaluationOutput(predictions=predictions, labels=labels, padding=output.padding)


def _owned(tensor: Tensor) -> Tensor:
    # A view would keep the whole storage below it in memory.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.detach()
