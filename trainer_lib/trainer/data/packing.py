"""Packing: token sequences side by side in rows of one length, with hardly any padding."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.options.base import check_count

Indices = npt.NDArray[np.int64]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens that hold the samples of a dataset side by side; each token appears exactly once.

    A row has `input_ids`; `position_ids`, which start at 0 for each sample; and `labels`: those of the samples, or else
    their tokens, with -100 for the first token of each sample, since no earlier token predicts it. There is no
    attention mask: models of transformers separate the samples of a row by their positions. The Trainer calls them so;
    where you call a model yourself, give `use_cache=False`. A sample longer than a row is split into pieces.

    Args:
        dataset: A map-style dataset of samples with `input_ids` (and possibly `labels`), or of lists of tokens.
        length: Tokens in a row.
        pad_token_id: The token that fills the end of a row.
        segment_ids: Whether rows also have `segment_ids`: 1 for the tokens of the first sample, 2 for those of the
            second …, 0 for padding.

    Example:
        >>> packed = PackedDataset([[1, 2, 3], [4, 5, 6, 7], [8]], length=4)
        >>> [row["input_ids"].tolist() for row in packed], packed[0]["position_ids"].tolist()
        ([[1, 2, 3, 8], [4, 5, 6, 7]], [0, 1, 2, 0])
    """

    length: int
    pad_token_id: int
    segment_ids: bool

    def __init__(self, dataset: Any, length: int, *, pad_token_id: int = 0, segment_ids: bool = False) -> None:
        check_count("length", length, at_least=2)
        if not length_of(dataset):
            raise ConfigurationError(
                f"There is nothing to pack: this {type(dataset).__name__} has no samples or no length. Give a "
                "map-style dataset with samples."
            )
        self.dataset = dataset
        self.length, self.pad_token_id, self.segment_ids = length, pad_token_id, segment_ids
        lengths = _lengths(dataset)
        self._pieces, self._starts = pack(lengths, length)
        self.tokens: int = int(lengths.sum())
        if not self.tokens:
            raise ConfigurationError("There is nothing to pack: all samples are empty.")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """The fraction of positions that hold tokens; the rest is padding."""
        return self.tokens / (len(self) * self.length)

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return the pieces in a row, in order: sample, first token, and the token after the last."""
        pieces = self._pieces[self._starts[index] : self._starts[index + 1]].tolist()
        return [(sample, start, stop) for sample, start, stop in pieces]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Row {index} is out of range: there are {len(self)} rows.")
        row = {
            "input_ids": torch.full((self.length,), self.pad_token_id),
            "labels": torch.full((self.length,), IGNORE_INDEX),
            "position_ids": torch.zeros(self.length, dtype=torch.int64),
        }
        segments = torch.zeros(self.length, dtype=torch.int64)
        end = 0
        for number, (sample, start, stop) in enumerate(self.pieces(index % len(self)), 1):
            columns = slice(end, end + stop - start)
            tokens, labels = _tokens_and_labels(self.dataset[sample], sample)
            row["input_ids"][columns] = tokens[start:stop]
            row["labels"][columns] = labels[start:stop]
            row["labels"][end] = IGNORE_INDEX
            row["position_ids"][columns] = torch.arange(stop - start)
            segments[columns] = number
            end = columns.stop
        row["position_ids"][end:] = torch.arange(self.length - end)  # separates padding from the last sample
        return row | {"segment_ids": segments} if self.segment_ids else row


def pack(lengths: Sequence[int] | Indices, length: int) -> tuple[Indices, Indices]:
    """Assign samples to rows: the longest first, each to the row in which it leaves the least free space.

    Args:
        lengths: The length of each sample.
        length: The length of a row.

    Returns:
        The pieces of all rows (sample, start and stop), and the index of the first piece of each row.

    Example:
        >>> pieces, starts = pack([5, 2, 1], 4)
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
    open_rows: dict[int, list[int]] = {}  # rows by their free space
    spaces: list[int] = []  # the keys of open_rows, sorted
    for sample in np.argsort(-rests, kind="stable").tolist():
        size = int(rests[sample])
        if not size:
            break
        index = bisect_left(spaces, size)
        if index < len(spaces):
            space = spaces[index]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[index]
        else:
            space, row = length, len(rows)
            rows.append([])
        rows[row].append((sample, int(sizes[sample]) - size, int(sizes[sample])))
        if space > size:
            if space - size not in open_rows:
                open_rows[space - size] = []
                insort(spaces, space - size)
            open_rows[space - size].append(row)
    # Keeps the rows close to the order of the data.
    ordered = sorted(sorted(row) for row in rows)
    flat = np.array([piece for row in ordered for piece in row], dtype=np.int64).reshape(-1, 3)
    return flat, np.cumsum([0, *map(len, ordered)])


def _lengths(dataset: Any) -> Indices:
    with RandomStream(0):  # keeps training's random generators unchanged
        if "input_ids" in (getattr(dataset, "column_names", None) or ()):
            lengths = [len(tokens) for tokens in dataset["input_ids"]]
        else:
            lengths = [len(_tokens_and_labels(dataset[index], index)[0]) for index in range(len(dataset))]
    return np.array(lengths, dtype=np.int64)


def _tokens_and_labels(sample: Any, index: int) -> tuple[Tensor, Tensor]:
    tokens, labels = sample, None
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ConfigurationError(
                f"Sample {index} has no field 'input_ids' to pack, only {', '.join(map(str, sample))}. Tokenize it "
                "first."
            )
        tokens, labels = sample["input_ids"], sample.get("labels")
    tokens = torch.as_tensor(tokens)
    labels = tokens if labels is None else torch.as_tensor(labels)
    if tokens.ndim != 1 or labels.shape != tokens.shape:
        raise ConfigurationError(
            f"Sample {index} cannot be packed: its tokens have shape {tuple(tokens.shape)} and its labels "
            f"{tuple(labels.shape)}. Both must be lists of the same length."
        )
    return tokens, labels
