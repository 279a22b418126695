"""Predictions on disk: one file per array, written row by row; text rows as lines of JSON.

A folder holds `predictions.json`, which maps the files to the structure of the predictions and is written last.
"""

import json
import os
import shutil
from array import array
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainer_lib.filesystem.atomic_files import path_inside, sync
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnwritableError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.tensors.pytree import map_leaves
from trainer_lib.trainer.data.batch_rows import count_output_rows
from trainer_lib.trainer.evaluation.row_buffers import Structure, common_shape, fill, padded_type, places_of

if TYPE_CHECKING:
    from trainer_lib.data_loader.order.permutation import Positions

MANIFEST = "predictions.json"
_VERSION = 1
_ROWS_AT_ONCE = 4096
_SMALLEST_HEADER = 128  # bytes, of an .npy file


def check_free(folder: Path) -> None:
    """Raise unless `folder` does not exist or is empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists and is not an empty folder. Give predict(to=…) a new folder.")


class PredictionFiles:
    """Writes predictions and labels batch by batch to a partial folder, which `commit` renames.

    Args:
        folder: The final folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._parts: dict[str, _Part] = {}

    def add(self, predictions: Any, labels: Any, padding: int) -> None:
        """Write a batch.

        Args:
            predictions: Its predictions.
            labels: Its labels.
            padding: What predictions of different sizes are padded with.
        """
        with self._write_errors():
            if not self._parts:
                shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed process
                self._partial.mkdir(parents=True)
                self._parts = {name: _Part(self._partial, name) for name in ("predictions", "labels")}
            self._parts["predictions"].padding = padding
            total = count_output_rows(predictions, labels)
            self._parts["predictions"].add(predictions, total)
            self._parts["labels"].add(labels, total)

    def commit(self, metrics: Mapping[str, float], order: "Positions | None" = None) -> None:
        """Write the manifest, and rename the partial folder to the final one.

        Args:
            metrics: The metrics of the predictions.
            order: The samples in the order in which they were read; `None`: in the order of the data.
        """
        with self._write_errors():
            parts = {name: part.close(order) for name, part in self._parts.items()}
            manifest = {"version": _VERSION, **parts, "metrics": dict(metrics)}
            (self._partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in self._partial.iterdir():
                sync(path)
            sync(self._partial)
            if self._folder.is_dir():
                self._folder.rmdir()  # empty: nothing is ever overwritten
            self._partial.rename(self._folder)
            sync(self._folder.parent)

    def abandon(self) -> None:
        """Remove what was written."""
        for part in self._parts.values():
            part.abandon()
        shutil.rmtree(self._partial, ignore_errors=True)

    @contextmanager
    def _write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise UnwritableError(
                f"{self._folder}: the predictions could not be written: {error.strerror or error}. Give predict(to=…) "
                "a folder that you can write to, on a disk with space."
            ) from error


def read_predictions(folder: Path) -> tuple[Any, Any, dict[str, float]]:
    """Return the predictions, labels and metrics in a folder; arrays are memory-mapped.

    Raises:
        CheckpointError: If there are none, or they are incomplete.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"There are no predictions in {folder}: {MANIFEST} is missing.")
    try:
        content = json.loads(manifest.read_text())
        if content["version"] != _VERSION:
            raise CheckpointError(f"{manifest} has version {content['version']}, but this library reads {_VERSION}.")
        return _read(folder, content["predictions"]), _read(folder, content["labels"]), content["metrics"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The predictions in {folder} are not whole: {error}") from error


class _Part:
    """The files of predictions, or of labels."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self.padding = folder, name, IGNORE_INDEX
        self._structure = Structure(name)
        self._shape: Any = None
        self._files: list[_ArrayFile | _TextFile | None] = []

    def add(self, batch: Any, total: int | None) -> None:
        """Write a batch of so many samples."""
        rows = [_texts_as_list(leaf_rows) for leaf_rows in self._structure.rows_of(batch, total)]
        if self._shape is None:
            numbers = [None if leaf_rows is None else index for index, leaf_rows in enumerate(rows)]
            self._shape = _described(self._structure.filled(numbers))
            self._files = [self._file(index, leaf_rows) for index, leaf_rows in enumerate(rows)]
        for file, leaf_rows in zip(self._files, rows, strict=True):
            if file is not None:
                file.append(leaf_rows)

    def close(self, order: "Positions | None") -> Any:
        """Finish the files, with the rows in the order of the data, and return the structure with their names."""
        names = [None if file is None else file.close(self.padding, order) for file in self._files]
        return _named(self._shape, names)

    def abandon(self) -> None:
        """Close the open files."""
        for file in self._files:
            if file is not None:
                with suppress(OSError):  # of a full disk, which does not take the rest of the buffer
                    file.abandon()

    def _file(self, index: int, rows: Any) -> "_ArrayFile | _TextFile | None":
        if rows is None:
            return None
        path = self._folder / f"{self._name}-{index}"
        return _TextFile(path, self._name) if isinstance(rows, list) else _ArrayFile(path, self._name)


class _TextFile:
    """Rows as lines of JSON."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path.with_suffix(".jsonl"), what
        self._file = self._path.open("wb")
        self._starts = array("q")  # of the lines

    def append(self, rows: list[Any]) -> None:
        """Write rows."""
        for row in rows:
            try:
                self._starts.append(self._file.tell())
                self._file.write(json.dumps(row, default=_array_as_list).encode() + b"\n")
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"A row of type {type(row).__name__} cannot be written to disk: {error}. Return tensors, strings "
                    "and numbers, or predict without to=."
                ) from error

    def close(self, padding: int, order: "Positions | None") -> str:
        """Finish the file and return its name."""
        del padding
        self._file.close()
        if order is not None:
            self._restore(places_of(order, len(self._starts), self._what))
        return self._path.name

    def abandon(self) -> None:
        """Close the file."""
        self._file.close()

    def _restore(self, places: "Positions") -> None:
        unordered = self._path.with_suffix(".unordered")
        self._path.rename(unordered)
        with unordered.open("rb") as lines, self._path.open("wb") as ordered:
            for row in np.argsort(places):
                lines.seek(self._starts[row])
                ordered.write(lines.readline())
        unordered.unlink()


class _ArrayFile:
    """Rows as an `.npy` file. Rows of another size begin a new file, and `close` joins all files."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._pieces: list[_Piece] = []

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        """Write rows."""
        if not self._pieces or not self._pieces[-1].fits(rows):
            if self._pieces:
                self._pieces[-1].close()
            self._pieces.append(_Piece(self._path.with_suffix(f".{len(self._pieces)}.npy"), rows))
        self._pieces[-1].append(rows)

    def close(self, padding: int, order: "Positions | None") -> str:
        """Finish the file and return its name."""
        whole = self._path.with_suffix(".npy")
        self._pieces[-1].close()
        if len(self._pieces) == 1 and order is None:
            self._pieces[0].path.rename(whole)
        else:
            self._join(whole, padding, order)
        return whole.name

    def abandon(self) -> None:
        """Close the open files."""
        if self._pieces:
            self._pieces[-1].file.close()

    def _join(self, path: Path, padding: int, order: "Positions | None") -> None:
        shape = common_shape([piece.shape for piece in self._pieces], self._what)
        dtype = np.result_type(*{piece.dtype for piece in self._pieces})
        dtype = padded_type(dtype) if any(piece.shape[1:] != shape[1:] for piece in self._pieces) else dtype
        places = None if order is None else places_of(order, shape[0], self._what)
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):  # without space it raises, where writing to mapped memory kills the process
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        row = 0
        for piece in self._pieces:
            rows = np.load(piece.path, mmap_mode="r", allow_pickle=False)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                if some.shape[1:] != shape[1:]:
                    whole[slice(row, row + len(some)) if places is None else places[row : row + len(some)]] = padding
                fill(whole, row, some, places)
                row += len(some)
            piece.path.unlink()
        whole.flush()


class _Piece:
    """An `.npy` file of rows of one size; `close` writes their number into its header."""

    def __init__(self, path: Path, like: np.ndarray[Any, Any]) -> None:
        self.path, self.dtype = path, like.dtype
        self.shape = (0, *like.shape[1:])
        self.file: BinaryIO = path.open("wb")
        self._write_header()
        self._start = self.file.tell()

    def fits(self, rows: np.ndarray[Any, Any]) -> bool:
        """Whether rows have the size and dtype of this file."""
        return rows.shape[1:] == self.shape[1:] and rows.dtype == self.dtype

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        """Write rows."""
        self.file.write(np.ascontiguousarray(rows).tobytes())
        self.shape = (self.shape[0] + len(rows), *self.shape[1:])

    def close(self) -> None:
        """Write the number of rows into the header, and close the file."""
        self.file.seek(0)
        self._write_header()
        assert self.file.tell() == self._start  # numpy leaves room for the first dimension to grow
        self.file.close()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self.file, header)


def _array_as_list(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


def _texts_as_list(rows: Any) -> Any:
    return rows.tolist() if isinstance(rows, np.ndarray) and rows.dtype.kind in "OSU" else rows


def _described(tree: Any) -> Any:
    """Return a structure, whose leaves are numbers, as JSON values."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {"dict": {str(key): _described(value) for key, value in tree.items()}}
    if isinstance(tree, (tuple, list)):
        return {"tuple" if isinstance(tree, tuple) else "list": [_described(value) for value in tree]}
    if fields := getattr(tree, "__dataclass_fields__", None):
        return {"dict": {name: _described(getattr(tree, name)) for name in fields}}
    return {"file": tree}


def _named(described: Any, names: list[str | None]) -> Any:
    """Return the structure with the names of its files."""
    return map_leaves(lambda leaf: names[leaf] if isinstance(leaf, int) else leaf, described)


def _read(folder: Path, described: Any) -> Any:
    if described is None:
        return None
    ((kind, value),) = described.items()
    if kind == "file":
        return _read_file(path_inside(folder, value, MANIFEST))
    if kind == "dict":
        return {key: _read(folder, part) for key, part in value.items()}
    parts = [_read(folder, part) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def _read_file(path: Path) -> Any:
    if path.suffix == ".npy":
        is_empty = path.stat().st_size <= _SMALLEST_HEADER  # an empty array cannot be memory-mapped
        return np.load(path, mmap_mode=None if is_empty else "r", allow_pickle=False)
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
