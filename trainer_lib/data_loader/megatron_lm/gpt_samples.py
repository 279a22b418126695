"""Samples of GPT from indexed datasets: runs of `seq_length` + 1 tokens, split, and mixed by weights."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer_lib.data_loader.megatron_lm.indexed_dataset import IndexedDataset
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count

Sample = dict[str, Tensor]


class GPTSamples(Dataset[Sample]):
    """The tokens of an indexed dataset, one sequence after the other, cut into samples that overlap by one token.

    Args:
        dataset: The sequences.
        seq_length: The length of the model's inputs; a sample has one token more, for the labels.
        sequences: The first sequence, and the one after the last; `None`: all.

    Example:
        >>> from trainer_lib.data_loader.megatron_lm.indexed_dataset import write_indexed_dataset
        >>> prefix = Path("text")
        >>> write_indexed_dataset(prefix, [[[1, 2, 3]], [[4, 5]]])
        >>> [sample["text"].tolist() for sample in GPTSamples(IndexedDataset(prefix), seq_length=2)]
        [[1, 2, 3], [3, 4, 5]]
    """

    dataset: IndexedDataset
    seq_length: int

    def __init__(self, dataset: IndexedDataset, seq_length: int, sequences: tuple[int, int] | None = None) -> None:
        check_count("seq_length", seq_length)
        self.dataset, self.seq_length = dataset, seq_length
        self._first, last = sequences or (0, len(dataset))
        self._ends = np.cumsum(dataset.sequence_lengths[self._first : last], dtype=np.int64)

    def __len__(self) -> int:
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        return max((tokens - 1) // self.seq_length, 0)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} samples (got index {index}).")
        begin = int(index) * self.seq_length
        end = begin + self.seq_length + 1
        sequence = int(np.searchsorted(self._ends, begin, side="right"))
        parts: list[Any] = []
        while begin < end:
            stop = int(self._ends[sequence])
            start_of_sequence = stop - int(self.dataset.sequence_lengths[self._first + sequence])
            if stop > begin:
                parts.append(
                    self.dataset.tokens(self._first + sequence, begin - start_of_sequence, end - start_of_sequence)
                )
                begin = min(stop, end)
            sequence += 1
        return {"text": torch.from_numpy(np.concatenate(parts).astype(np.int64))}


class BlendedSamples(Dataset[Sample]):
    """Samples of several datasets, mixed evenly by weights, until the first dataset has no more.

    Args:
        datasets: The datasets.
        weights: What share of the samples each has, relative to the others.

    Example:
        >>> even, odd = [0, 2, 4, 6], [1, 3]
        >>> list(BlendedSamples([even, odd], [2, 1]))
        [0, 1, 2, 4, 3, 6]
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]) -> None:
        shares = np.array([_positive(weight) for weight in weights])
        shares = shares / shares.sum()
        sizes = [len(dataset) for dataset in datasets]
        total = min(math.floor(size / share + 1e-9) for size, share in zip(sizes, shares, strict=True))
        counts = [min(round(total * share), size) for size, share in zip(sizes, shares, strict=True)]
        self.datasets: list[Any] = list(datasets)
        owners = np.concatenate([np.full(count, index, np.int16) for index, count in enumerate(counts)])
        samples = np.concatenate([np.arange(count) for count in counts])
        times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        order = np.argsort(times, kind="stable")
        self._owners, self._samples = owners[order], samples[order]

    def __len__(self) -> int:
        return len(self._owners)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} samples (got index {index}).")
        return self.datasets[int(self._owners[index])][int(self._samples[index])]


def gpt_datasets(paths: Sequence[tuple[float, str]], splits: str, seq_length: int) -> list[Dataset[Sample] | None]:
    """Return the samples to train on, to validate on and to test on; `None` for a split of size 0.

    Args:
        paths: The weight of each dataset, and its files without `.bin` and `.idx`.
        splits: The sizes of the splits relative to each other, such as "949,50,1".
        seq_length: The length of the model's inputs.

    Raises:
        ConfigurationError: If a split has no sample.
    """
    sources = [IndexedDataset(path) for _, path in paths]
    result: list[Dataset[Sample] | None] = []
    for number, (begin, end) in enumerate(split_bounds(splits)):
        if begin == end:
            result.append(None)
            continue
        parts = [
            GPTSamples(source, seq_length, (round(begin * len(source)), round(end * len(source)))) for source in sources
        ]
        if number == 0 or any(len(part) for part in parts):
            _check_not_empty(parts, paths, splits, seq_length)
        result.append(parts[0] if len(parts) == 1 else BlendedSamples(parts, [weight for weight, _ in paths]))
    return result


def split_bounds(splits: str) -> list[tuple[float, float]]:
    """Return where each of three splits begins and ends, as shares of all sequences.

    Example:
        >>> split_bounds("3,1")
        [(0.0, 0.75), (0.75, 1.0), (1.0, 1.0)]
    """
    try:
        sizes = [float(part) for part in splits.replace("/", ",").split(",")]
    except (ValueError, AttributeError):
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0 or not 0 < sum(sizes) < math.inf:
        raise ConfigurationError(
            f"splits_string must have one to three sizes of at least 0 (got {shown(splits)}). Example: '949,50,1'."
        )
    sizes += [0.0] * (3 - len(sizes))
    ends = [sum(sizes[: index + 1]) / sum(sizes) for index in range(3)]
    return list(zip([0.0, *ends[:2]], ends, strict=True))


def weighted_paths(data_path: Any) -> list[tuple[float, str]]:
    """Return the weight and the path of each dataset, from a path, a list of paths, or of weights and paths in turn.

    Example:
        >>> weighted_paths(["0.3", "wiki", "0.7", "books"])
        [(0.3, 'wiki'), (0.7, 'books')]
    """
    values: list[Any] = [data_path] if isinstance(data_path, (str, Path)) else list(data_path or [])
    numbers = [_number(value) for value in values]
    if len(values) > 1 and len(values) % 2 == 0 and all(number is not None for number in numbers[::2]):
        return [(_positive(numbers[index]), str(values[index + 1])) for index in range(0, len(values), 2)]
    if not values:
        raise ConfigurationError("data_path must be the path of an indexed dataset, or a list of them (got none).")
    return [(1.0, str(value)) for value in values]


def _check_not_empty(parts: Sequence[GPTSamples], paths: Any, splits: str, seq_length: int) -> None:
    for part, (_, path) in zip(parts, paths, strict=True):
        if not len(part):
            raise ConfigurationError(
                f"{path} has no sample of seq_length={seq_length} in one of the splits {splits!r}: its "
                f"{len(part.dataset)} sequences have {int(part.dataset.sequence_lengths.sum())} tokens. Give a "
                "shorter seq_length, other splits, or more data."
            )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _positive(weight: Any) -> float:
    number = _number(weight)
    if number is None or not 0 < number < math.inf:
        raise ConfigurationError(f"The weight of a dataset must be a finite number above 0 (got {shown(weight)}).")
    return number
