"""Reading data files: JSONL, JSON, CSV, Parquet, text, folders of images, datasets of Hugging Face."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.train.data_table import Table
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_EVALUATION = ("validation", "valid", "val", "eval", "dev", "test")  # the names of a split to evaluate on
_TRAINING = "train"

Row = tuple[str, Mapping[str, Any]]  # where it stands, and its values


def read_data(data: str, option: str = "data", split: str = _TRAINING) -> tuple[Table, Table | None]:
    """Return the data of a file, folder or name, and the evaluation data that comes with it, if any.

    Args:
        data: The path or name.
        option: The argument that gives it, for errors.
        split: The split to return, of a dataset that has several.

    Raises:
        ConfigurationError: If it is not there, empty, or broken; with the line, where files have lines.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return _file(path), None
    if path.is_dir():
        return _folder(path, option, split)
    is_name = _HUB_NAME.fullmatch(data) is not None and path.suffix not in _READERS
    if not is_name:
        raise ConfigurationError(f"--{option} {data}: there is no such file or folder (in {Path.cwd()}).")
    return _from_hub(data, option, split)


def _file(path: Path) -> Table:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(f"{path}: {unknown('kind of data file', path.suffix, _READERS)}")
    if not path.stat().st_size:
        raise ConfigurationError(f"{path} is empty.")
    try:
        table = reader(path)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not a text file in UTF-8: {error}.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not table.rows:
        raise ConfigurationError(f"{path} has no rows.")
    return table


def _folder(path: Path, option: str, split: str) -> tuple[Table, Table | None]:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _hugging_face(require("datasets", "datasets").load_from_disk(str(path)), str(path), option, split)
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in _READERS)
    if files:
        named = {each.stem.partition("-")[0].partition(".")[0]: each for each in files}
        evaluation = next((named[name] for name in _EVALUATION if name in named), None)
        training = [named[_TRAINING]] if _TRAINING in named else [each for each in files if each != evaluation]
        return _joined([_file(each) for each in training], path), None if evaluation is None else _file(evaluation)
    return _image_folder(path, option, split)


def _joined(tables: Sequence[Table], path: Path) -> Table:
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    columns = {
        name: [value for table in tables for value in table.columns.get(name, [None] * table.rows)] for name in names
    }
    places = [table.where(row) for table in tables for row in range(table.rows)]
    return Table(str(path), columns, len(places), places, str(path))


# -- files -----------------------------------------------------------------------------------------------------------


def _table(path: Path, rows: Iterator[Row]) -> Table:
    """Return a table of rows that may leave columns out."""
    places: list[str] = []
    values: list[Mapping[str, Any]] = []
    for place, row in rows:
        places.append(place)
        values.append(row)
    names = dict.fromkeys(name for row in values for name in row)
    columns = {name: [row.get(name) for row in values] for name in names}
    return Table(str(path), columns, len(values), places, str(path.parent))


def _jsonl(path: Path) -> Table:
    def rows() -> Iterator[Row]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", _object(line, f"{path}, line {number}")

    return _table(path, rows())


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}: invalid JSON: {error.msg} (column {error.colno}).") from error
    return _checked_object(value, where)


def _checked_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f'{where}: a row must be an object such as {{"text": …}}, got {shown(value)}.')
    return value


def _json(path: Path) -> Table:
    text = path.read_text(encoding="utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " A file with an object on each line is called .jsonl." if error.msg == "Extra data" else ""
        raise ConfigurationError(f"{path}, line {error.lineno}: invalid JSON: {error.msg}.{hint}") from error
    if not isinstance(values, list):
        raise ConfigurationError(f"{path} must hold a list of objects, and holds a {type(values).__name__}.")
    return _table(path, ((f"row {n}", _checked_object(row, f"{path}, row {n}")) for n, row in enumerate(values, 1)))


def _csv(path: Path) -> Table:
    def rows() -> Iterator[Row]:
        csv.field_size_limit(sys.maxsize)  # by default a document of more than 131,072 characters is an error
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            try:
                header = next(reader, [])
                _check_header(header, path)
                for values in reader:
                    if values and len(values) != len(header):
                        raise ConfigurationError(
                            f"{path}, line {reader.line_num}: {len(values)} values, and the first line names "
                            f"{len(header)} columns. Put values with a separator or a line break in double quotes."
                        )
                    if values:
                        yield f"line {reader.line_num}", {n: v or None for n, v in zip(header, values, strict=True)}
            except csv.Error as error:
                raise ConfigurationError(f"{path}, line {reader.line_num}: invalid CSV: {error}.") from error

    return _table(path, rows())


def _check_header(header: Sequence[str], path: Path) -> None:
    repeated = [name for name in header if header.count(name) > 1]
    if repeated or not all(name.strip() for name in header):
        wrong = f"names {repeated[0]!r} twice" if repeated else "has a column without a name"
        raise ConfigurationError(f"{path}, line 1: the first line names the columns, and {wrong}.")


def _text(path: Path) -> Table:
    # Not `splitlines`, which cuts lines at form feeds and separators of Unicode too.
    lines = [(number, line) for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1) if line.strip()]
    return _table(path, ((f"line {number}", {"text": line}) for number, line in lines))


def _parquet(path: Path) -> Table:
    parquet: Any = require("pyarrow.parquet", "datasets", "pyarrow")
    arrow: Any = require("pyarrow", "datasets")
    try:
        table = parquet.read_table(path)
    except arrow.ArrowException as error:
        raise ConfigurationError(f"{path} is no Parquet file that can be read: {error}") from error
    return Table(str(path), table.to_pydict(), table.num_rows, folder=str(path.parent))


_READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _text,
}


# -- folders of images -----------------------------------------------------------------------------------------------


def _image_folder(path: Path, option: str, split: str) -> tuple[Table, Table | None]:
    folders = {each.name: each for each in sorted(path.iterdir()) if each.is_dir()}
    if split in folders and not any(each.suffix.lower() in IMAGES for each in folders[split].iterdir()):
        other = next((name for name in _EVALUATION if name in folders), None)
        return _images(folders[split]), None if other is None else _images(folders[other])
    table = _images(path)
    if not table.rows:
        kinds = ", ".join(_READERS)
        raise ConfigurationError(
            f"--{option} {path}: the folder has no data. It needs files ({kinds}), or a folder of images for each "
            "class, or the files of a saved dataset of Hugging Face."
        )
    return table, None


def _images(path: Path) -> Table:
    folders = sorted(each for each in path.iterdir() if each.is_dir())
    files = [each for folder in folders for each in sorted(folder.rglob("*")) if each.suffix.lower() in IMAGES]
    labels = [each.relative_to(path).parts[0] for each in files]
    places = [str(each.relative_to(path)) for each in files]
    return Table(str(path), {"image": [str(each) for each in files], "label": labels}, len(files), places, str(path))


# -- datasets of Hugging Face ----------------------------------------------------------------------------------------


def _from_hub(name: str, option: str, split: str) -> tuple[Table, Table | None]:
    datasets: Any = require("datasets", "datasets")
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"--{option} {name}: there is no such file or folder (in {Path.cwd()}), and Hugging Face's datasets cannot "
            f"load it by name: {reason}"
        ) from error
    return _hugging_face(loaded, name, option, split)


def _hugging_face(loaded: Any, source: str, option: str, split: str) -> tuple[Table, Table | None]:
    if not isinstance(loaded, Mapping):
        return _of_dataset(loaded, source), None
    if split not in loaded:
        raise ConfigurationError(f"--{option} {source}: {unknown('split', split, loaded)} Name one with --data_split.")
    other = next((name for name in _EVALUATION if name in loaded and name != split), None)
    evaluation = None if other is None or option != "data" else _of_dataset(loaded[other], f"{source} ({other})")
    return _of_dataset(loaded[split], f"{source} ({split})"), evaluation


def _of_dataset(dataset: Any, source: str) -> Table:
    if not len(dataset):
        raise ConfigurationError(f"{source} has no rows.")
    columns: dict[str, Any] = {}
    for name in dataset.column_names:
        names = getattr(dataset.features[name], "names", None) or getattr(
            getattr(dataset.features[name], "feature", None), "names", None
        )
        values = list(dataset[name])
        columns[name] = values if names is None else [_named(value, names) for value in values]
    return Table(source, columns, len(dataset))


def _named(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a class, or of each in a list."""
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
