"""This file is packing: token sequences laid side by side in rows of one length, so that hardly anything is padding."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.foundation.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.datasets import length_of

Indices = npt.NDArray[np.int64]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, in which the samples of a dataset lie side by side. Every token is there once.

    A row has `input_ids`; `position_ids`, which begin at 0 with each sample; and `labels`: those of the samples, or
    else their tokens, but for the first token of each, which none before it tells (-100). There is no attention mask:
    models of transformers keep the samples of a row apart by their positions, when called with `use_cache=False`. A
    sample that is longer than a row is cut into pieces.

    Args:
        dataset: A map-style dataset of samples with `input_ids` (and possibly `labels`), or of lists of tokens.
        length: How many tokens a row has.
        pad_token_id: What fills the end of a row.
        segment_ids: Whether rows have `segment_ids` too: 1 for the tokens of the first sample, 2 for those of the
            second …, 0 for padding.

    Example:
        >>> packed = PackedDataset([[1, 2, 3], [4, 5, 6, 7], [8]], length=4)
        >>> [row["input_ids"].tolist() for row in packed], packed[0]["position_ids"].tolist()
        ([[1, 2, 3, 8], [4, 5, 6, 7]], [0, 1, 2, 0])
    """

    def __init__(self, dataset: Any, length: int, *, pad_token_id: int = 0, segment_ids: bool = False) -> None:
        check_count("length", length, at_least=2)
        if not length_of(dataset):
            raise ConfigurationError(
                f"There is nothing to pack: this {type(dataset).__name__} has no samples, or no length."
            )
        self.dataset = dataset
        self.length, self.pad_token_id, self.segment_ids = length, pad_token_id, segment_ids
        lengths = _lengths(dataset)
        self._pieces, self._starts = packed(lengths, length)
        self.tokens = int(lengths.sum())
        if not self.tokens:
            raise ConfigurationError("There is nothing to pack: no sample has a token.")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """The part of all places that tokens stand in; the rest is padding."""
        return self.tokens / (len(self) * self.length)

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return what lies in a row, in order: sample, and from which of its tokens to which."""
        own = self._pieces[self._starts[index] : self._starts[index + 1]].tolist()
        return [(sample, start, stop) for sample, start, stop in own]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        row = {
            "input_ids": torch.full((self.length,), self.pad_token_id),
            "labels": torch.full((self.length,), IGNORE_INDEX),
            "position_ids": torch.zeros(self.length, dtype=torch.int64),
        }
        segments = torch.zeros(self.length, dtype=torch.int64)
        end = 0
        for number, (sample, start, stop) in enumerate(self.pieces(index % len(self)), 1):
            place = slice(end, end + stop - start)
            tokens, labels = _tokens_and_labels(self.dataset[sample], sample)
            row["input_ids"][place] = tokens[start:stop]
            row["labels"][place] = labels[start:stop]
            row["labels"][end] = IGNORE_INDEX
            row["position_ids"][place] = torch.arange(stop - start)
            segments[place] = number
            end = place.stop
        row["position_ids"][end:] = torch.arange(self.length - end)  # apart from the last sample too
        return row | {"segment_ids": segments} if self.segment_ids else row


def packed(lengths: Sequence[int] | Indices, length: int) -> tuple[Indices, Indices]:
    """Say what lies in which row: the longest first, each where the least place would be left.

    Args:
        lengths: The length of each sample.
        length: The length of a row.

    Returns:
        The pieces of all rows (sample, start and stop), and where those of each row begin.

    Example:
        >>> pieces, starts = packed([5, 2, 1], 4)
        >>> pieces.tolist(), starts.tolist()
        ([[0, 0, 4], [0, 4, 5], [1, 0, 2], [2, 0, 1]], [0, 1, 4])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    rows = [
        [(sample, start, start + length)]
        for sample in np.flatnonzero(sizes >= length).tolist()
        for start in range(0, int(sizes[sample]) - length + 1, length)
    ]
    rests = sizes % length
    waiting: dict[int, list[int]] = {}  # by the place that is left: the rows
    places: list[int] = []  # that are left in some row, in order
    for sample in np.argsort(-rests, kind="stable").tolist():
        size = int(rests[sample])
        if not size:
            break
        found = bisect_left(places, size)
        if found < len(places):
            left = places[found]
            row = waiting[left].pop()
            if not waiting[left]:
                del waiting[left], places[found]
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append((sample, int(sizes[sample]) - size, int(sizes[sample])))
        if left > size:
            if left - size not in waiting:
                waiting[left - size] = []
                insort(places, left - size)
            waiting[left - size].append(row)
    # As near to the order of the data as can be.
    ordered = sorted(sorted(row) for row in rows)
    flat = np.array([piece for row in ordered for piece in row], dtype=np.int64).reshape(-1, 3)
    return flat, np.cumsum([0, *map(len, ordered)])


def _lengths(dataset: Any) -> Indices:
    with RandomStream(0):  # looking at samples is not to draw from the numbers of training
        if "input_ids" in (getattr(dataset, "column_names", None) or ()):
            found = [len(tokens) for tokens in dataset["input_ids"]]
        else:
            found = [len(_tokens_and_labels(dataset[index], index)[0]) for index in range(len(dataset))]
    return np.array(found, dtype=np.int64)


def _tokens_and_labels(sample: Any, index: int) -> tuple[Tensor, Tensor]:
    tokens, labels = sample, None
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ConfigurationError(
                f"Sample {index} has no 'input_ids' to pack. It has: {', '.join(map(str, sample))}. Tokenize it first."
            )
        tokens, labels = sample["input_ids"], sample.get("labels")
    tokens = torch.as_tensor(tokens)
    labels = tokens if labels is None else torch.as_tensor(labels)
    if tokens.ndim != 1 or labels.shape != tokens.shape:
        raise ConfigurationError(
            f"Sample {index} cannot be packed: its tokens are of shape {tuple(tokens.shape)} and its labels of "
            f"{tuple(labels.shape)}. Both have to be a list, of the same length."
        )
    return tokens, labels
