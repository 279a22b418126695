"""Megatron-LM's indexed datasets: tokens in a `.bin` file, and where each sequence begins in an `.idx` file."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1
    )
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_SMALL_VOCABULARY = 65500  # Megatron-LM writes smaller ones as uint16


class IndexedDataset(Dataset[np.ndarray[Any, Any]]):
    """The sequences of an indexed dataset, read by memory map.

    Args:
        prefix: The path of the files, without `.bin` and `.idx`.

    Attributes:
        prefix: The path of the files, without `.bin` and `.idx`.
        dtype: The type of the tokens.
        sequence_lengths: How many tokens each sequence has.
        sequence_pointers: The byte of the `.bin` file at which each sequence begins.
        document_indices: The first sequence of each document, and the number of sequences.
        sequence_modes: The mode of each sequence in a multimodal dataset, else `None`.

    Raises:
        ConfigurationError: If a file is missing, damaged, or of another format.

    Example:
        >>> prefix = Path("text")
        >>> write_indexed_dataset(prefix, [[[5, 6, 7]], [[8, 9]]])
        >>> [sequence.tolist() for sequence in IndexedDataset(prefix)]
        [[5, 6, 7], [8, 9]]
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix: str = str(prefix)
        self._open()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences (got index {index}).")
        return self.tokens(int(index) % len(self))

    def tokens(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        """Return tokens of a sequence, as a view of the file.

        Args:
            sequence: The sequence.
            start: The first token.
            stop: The token after the last one; `None`: all that follow.
        """
        length = int(self.sequence_lengths[sequence])
        stop = length if stop is None else min(stop, length)
        begin = int(self.sequence_pointers[sequence]) + start * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, max(stop - start, 0), begin)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process opens the files itself."""
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["prefix"])

    def _open(self) -> None:
        path = Path(f"{self.prefix}.idx")
        index = _mapped(path)
        self.dtype: np.dtype[Any]
        sequences, documents, self.dtype = _header(path, index)
        lengths, pointers, indices = sequences * 4, sequences * 8, documents * 8
        needed = _HEADER.size + lengths + pointers + indices
        if len(index) not in (needed, needed + sequences):
            raise ConfigurationError(
                f"{path} is damaged: {sequences} sequences and {documents} documents take {needed} bytes (the file has "
                f"{len(index)}). Build the dataset again."
            )
        place = _HEADER.size
        self.sequence_lengths: NDArray[Any] = np.frombuffer(index, np.int32, sequences, place)
        self.sequence_pointers: NDArray[Any] = np.frombuffer(index, np.int64, sequences, place + lengths)
        self.document_indices: NDArray[Any] = np.frombuffer(index, np.int64, documents, place + lengths + pointers)
        has_modes = len(index) > needed
        self.sequence_modes: NDArray[Any] | None = (
            np.frombuffer(index, np.int8, sequences, needed) if has_modes else None
        )
        self._tokens = _mapped(Path(f"{self.prefix}.bin"))
        self._check_ends()

    def _check_ends(self) -> None:
        ends = self.sequence_pointers + self.sequence_lengths.astype(np.int64) * self.dtype.itemsize
        if len(ends) and (ends.max() > len(self._tokens) or self.sequence_pointers.min() < 0):
            raise ConfigurationError(
                f"{self.prefix}.bin is cut off: its index needs {int(ends.max())} bytes (the file has "
                f"{len(self._tokens)}). Copy both files again."
            )


def write_indexed_dataset(
    prefix: str | Path, documents: Iterable[Iterable[Sequence[int]]], vocab_size: int | None = None
) -> None:
    """Write an indexed dataset as Megatron-LM does.

    Args:
        prefix: The path of the files, without `.bin` and `.idx`.
        documents: The documents: each has sequences, which are lists of tokens.
        vocab_size: The size of the vocabulary: below 65500, tokens take two bytes instead of four.

    Raises:
        ConfigurationError: If a token is not in the vocabulary, or too large for four bytes.
    """
    dtype = np.dtype(np.uint16 if vocab_size is not None and vocab_size < _SMALL_VOCABULARY else np.int32)
    lengths: list[int] = []
    ends = [0]
    with Path(f"{prefix}.bin").open("wb") as file:
        for document in documents:
            lengths += [_write_sequence(file, sequence, dtype, vocab_size) for sequence in document]
            ends.append(len(lengths))
    sizes = np.array(lengths, np.int64)
    pointers = (np.cumsum(sizes) - sizes) * dtype.itemsize
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], len(lengths), len(ends)))
        arrays = sizes.astype(np.int32), pointers.astype(np.int64), np.array(ends, np.int64)
        file.writelines(values.tobytes() for values in arrays)


def _write_sequence(file: BinaryIO, sequence: Sequence[int], dtype: np.dtype[Any], vocab_size: int | None) -> int:
    tokens = np.asarray(sequence, np.int64)
    limit = np.iinfo(dtype).max + 1 if vocab_size is None else vocab_size
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < limit:
        raise ConfigurationError(f"Tokens must be at least 0 and below {limit} (got {shown(sequence)}).")
    file.write(tokens.astype(dtype).tobytes())
    return len(tokens)


def _mapped(path: Path) -> Any:
    try:
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}. Give the path of an indexed dataset without its ending: it has "
            "a .bin and an .idx file."
        ) from error


def _header(path: Path, index: Any) -> tuple[int, int, np.dtype[Any]]:
    """Return the numbers of sequences and of document ends, and the type of the tokens."""
    start = bytes(index[: _HEADER.size])
    if start.startswith(_LEGACY_MAGIC):
        raise ConfigurationError(
            f"{path} has Megatron-LM's old format (lazy or cached). Build the dataset again with Megatron-LM's "
            "tools/preprocess_data.py, which writes the memory-mapped format."
        )
    magic, version, code, sequences, documents = (
        _HEADER.unpack(start) if len(start) == _HEADER.size else (b"", 0, 0, 0, 0)
    )
    if magic != _MAGIC or version != _VERSION or code not in _TYPES:
        raise ConfigurationError(
            f"{path} is no index of a dataset of Megatron-LM: it begins with {start[:9]!r}, version {version}, type "
            f"{code} (needed: {_MAGIC!r}, version {_VERSION}, type 1 to {len(_TYPES)})."
        )
    return sequences, documents, _TYPES[code]
