"""This rank's part of a batch: sequences padded and cut, labels shifted before."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.context_parallel.documents import documents_of_lengths, documents_of_positions
from trainer_lib.context_parallel.sequence_layout import SequenceLayout
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.batch_fields import (
    IGNORE_INDEX,
    SHIFTED_LABELS,
    as_mapping,
    label_names_in,
    replaced,
)

_INPUTS = ("input_ids", "inputs_embeds")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@frozen_dataclass
class BatchCut:
    """How the batches of a model are cut.

    Args:
        layout: Which part of a sequence each rank holds.
        label_names: The names of a batch that are targets.
        ignore_index: The label that the loss ignores.
        shifts_labels: The model compares each position with the next label.
        takes_positions: The model takes `position_ids`, which a part of a sequence needs.
        separates_documents: The model's attention stays within the documents that `position_ids` show.
    """

    layout: SequenceLayout
    label_names: Sequence[str] | None = None
    ignore_index: int = IGNORE_INDEX
    shifts_labels: bool = False
    takes_positions: bool = False
    separates_documents: bool = False

    def part(self, batch: Any) -> "BatchPart":
        """Return this rank's part of a batch.

        Raises:
            ConfigurationError: If the batch has no sequences, or targets that cannot be cut.
        """
        named = as_mapping(batch)
        values: dict[Any, Any] = dict(enumerate(_listed(batch))) if named is None else dict(named)
        labels = _target_keys(values, named, self.label_names)
        length = sequence_length(values, labels)
        documents = self._documents(values, length)
        values = {key: value for key, value in values.items() if key not in _LENGTHS}
        if named is not None:
            self._shift(values, labels)
            if self.takes_positions and "position_ids" not in values:
                values["position_ids"] = _positions(next(iter(_sequences(values, length).values())))
        sequences = _sequences(values, length)
        _check_targets({key: values[key] for key in labels}, sequences, length)
        whole = self.layout.padded(length)
        for key, tensor in sequences.items():
            is_target = key in labels or key == SHIFTED_LABELS
            padded = self._padded(tensor, whole - length, is_target)
            values[key] = self.layout.shard(padded, 1)
        if documents is not None:
            documents = torch.nn.functional.pad(documents, (0, whole - length), value=-1)
        return BatchPart(_rebuilt(batch, named, values), whole, length, documents)

    def _shift(self, values: dict[Any, Any], labels: Sequence[Any]) -> None:
        """Replace labels by those of the next positions, for models that would shift them."""
        if not self.shifts_labels or not labels:
            return
        (name,) = labels[:1]
        if SHIFTED_LABELS not in values:
            values[SHIFTED_LABELS] = torch.nn.functional.pad(values[name], (0, 1), value=self.ignore_index)[:, 1:]
        values[name] = values[SHIFTED_LABELS]

    def _documents(self, values: Mapping[Any, Any], length: int) -> Tensor | None:
        cumulative = values.get(_LENGTHS[0])
        if isinstance(cumulative, Tensor):
            return documents_of_lengths(cumulative, length)
        positions = values.get("position_ids")
        if not self.separates_documents or positions is None or values.get("attention_mask") is not None:
            return None
        return documents_of_positions(positions)

    def _padded(self, tensor: Tensor, added: int, is_target: bool) -> Tensor:
        if not added:
            return tensor
        if is_target and tensor.is_floating_point():
            raise ConfigurationError(
                f"Targets of {tensor.dtype} have no value that a loss ignores, and sequences of {tensor.shape[1]} need "
                f"{added} more positions to be cut for {self.layout.size} ranks. Return sequences whose length is a "
                f"multiple of {self.layout.multiple} from the dataset or collate_fn."
            )
        end = tensor.new_full((tensor.shape[0], added, *tensor.shape[2:]), self.ignore_index if is_target else 0)
        return torch.cat([tensor, end], 1)


@frozen_dataclass
class BatchPart:
    """A rank's part of a batch.

    Args:
        batch: The batch, with a part of its sequences.
        length: The length of the whole sequences, with padding.
        real_length: Their length without the padding that was added.
        documents: The number of the document of each position of the whole sequences.
    """

    batch: Any
    length: int
    real_length: int
    documents: Tensor | None


def sequence_length(values: Mapping[Any, Any], labels: Sequence[Any]) -> int:
    """Return the length of the sequences in a batch.

    Raises:
        ConfigurationError: If there is no tensor of sequences.
    """
    candidates = [values[name] for name in _INPUTS if values.get(name) is not None]
    candidates += [value for key, value in values.items() if key not in labels]
    for value in candidates:
        if isinstance(value, Tensor) and value.ndim > 1:
            return value.shape[1]
    raise ConfigurationError(
        "The batch has no sequences to cut: no input is a tensor of [batch, positions, …]. Set cp_size and sp_size to "
        "1, or return such a tensor first."
    )


def first_positions(batch: Any, label_names: Sequence[str] | None, length: int) -> Any:
    """Return the first positions of the first row of a batch, with a target at each."""
    named = as_mapping(batch)
    values: dict[Any, Any] = dict(enumerate(_listed(batch))) if named is None else dict(named)
    labels = _target_keys(values, named, label_names)
    sequences = _sequences(values, sequence_length(values, labels))
    for key, value in values.items():
        if key in sequences:
            value = value[:1, :length]
            is_class = key in (*labels, SHIFTED_LABELS) and not value.is_floating_point()
            values[key] = value.clamp(min=0) if is_class else value
        elif isinstance(value, Tensor) and value.ndim and key not in _LENGTHS:
            values[key] = value[:1]
    return _rebuilt(batch, named, {key: value for key, value in values.items() if key not in _LENGTHS})


def _listed(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, (tuple, list)) else [batch]


def _rebuilt(batch: Any, named: Any, values: Mapping[Any, Any]) -> Any:
    if named is None:
        return type(batch)(values.values()) if isinstance(batch, (tuple, list)) else values[0]
    return dict(values) if isinstance(batch, Mapping) else replaced(batch, values)


def _target_keys(values: Mapping[Any, Any], named: Any, label_names: Sequence[str] | None) -> list[Any]:
    if named is not None:
        return list(label_names_in(values, label_names))
    return [len(values) - 1] if len(values) > 1 else []


def _sequences(values: Mapping[Any, Any], length: int) -> dict[Any, Tensor]:
    """Return the tensors with a position for each of the sequences."""
    found: dict[Any, Tensor] = {}
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.ndim < 2:
            continue
        if "mask" in str(key) and value.ndim > 2:
            raise UnsupportedError(
                f"{key} of shape {tuple(value.shape)} cannot be cut: context parallelism takes masks of padding, "
                f"[batch, {length}]."
            )
        if value.shape[1] == length:
            found[key] = value
    return found


def _check_targets(targets: Mapping[Any, Any], sequences: Mapping[Any, Tensor], length: int) -> None:
    for key, target in targets.items():
        if isinstance(target, Tensor) and key not in sequences:
            raise ConfigurationError(
                f"Context parallelism needs a target for each position: [batch, {length}, …] (got shape "
                f"{tuple(target.shape)}). Set cp_size and sp_size to 1 for models with one target per sequence."
            )


def _positions(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[1], device=tensor.device).repeat(tensor.shape[0], 1)
