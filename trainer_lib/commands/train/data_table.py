"""Data as columns by name, whose rows know the line they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

# The names by which a column is recognized, the most telling first.
GUESSES: Mapping[str, Sequence[str]] = {
    "text": ("text", "sentence", "content", "review", "document", "body", "prompt", "question"),
    "tokens": ("tokens", "words"),
    "source": ("source", "src", "input", "question", "article", "document", "prompt", "text"),
    "target": ("target", "tgt", "output", "summary", "answer", "translation", "response", "completion"),
    "label": ("label", "labels", "class", "category", "target", "sentiment", "intent", "y"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "number": ("label", "labels", "target", "score", "value", "price", "rating", "y"),
    "image": ("image", "img", "file", "path", "filename", "file_name"),
}


@frozen_dataclass
class Table:
    """Columns of equal length.

    Attributes:
        source: The file or dataset, for messages.
        columns: The values by column.
        rows: The number of rows.
        places: Where each row stands, such as "line 7"; empty: rows are counted from 1.
        folder: The folder that paths in it are relative to.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    rows: int
    places: Sequence[str] = field(default_factory=tuple[str, ...], repr=False)
    folder: str = "."

    def where(self, row: int) -> str:
        """Return where a row stands, for messages."""
        return f"{self.source}, {self.places[row] if self.places else f'row {row + 1}'}"

    def find(self, kind: str, option: str, given: str | None) -> str:
        """Return the name of a column.

        Args:
            kind: What it holds, a key of `GUESSES`.
            option: The argument that names it.
            given: The value of that argument; `None`: guess by name.

        Raises:
            ConfigurationError: If there is no such column.
        """
        known = ", ".join(map(repr, self.columns))
        if given is not None:
            if given not in self.columns:
                near = did_you_mean(given, self.columns)
                raise ConfigurationError(f"{self.source} has no column {given!r} (--{option}). It has {known}.{near}")
            return given
        by_lower_case = {name.lower(): name for name in self.columns}
        found = next((by_lower_case[name] for name in GUESSES[kind] if name in by_lower_case), None)
        if found is None:
            raise ConfigurationError(
                f"{self.source} has no column that is known to hold the {kind}. It has {known}. "
                f"Name it: --{option} NAME."
            )
        return found

    def values(self, name: str, kinds: type | tuple[type, ...], what: str, option: str) -> list[Any]:
        """Return the values of a column, each of which has to be of a type.

        Args:
            name: The column.
            kinds: The types.
            what: What is allowed, in words.
            option: The argument that names the column.

        Raises:
            ConfigurationError: With the line of a value that is missing or of another type.
        """
        if name not in self.columns:
            raise ConfigurationError(f"{self.source} has no column {name!r}, which the training data has.")
        values = list(self.columns[name])
        for row, value in enumerate(values):
            if value is None or not isinstance(value, kinds):
                got = "is missing" if value is None else f"is {shown(value)}"
                raise ConfigurationError(
                    f"{self.where(row)}: {name!r} {got}, and must be {what}. Correct it, or name another column with "
                    f"--{option}."
                )
        return values
