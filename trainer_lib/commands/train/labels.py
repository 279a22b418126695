"""Classes from the labels in data: integers or texts, each with a number."""

from collections.abc import Iterable, Sequence
from typing import Any

from trainer_lib.commands.train.data_table import Table
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

_KINDS = "an integer or a text"


class Classes:
    """The classes of a task, in the order of their numbers.

    Args:
        labels: Labels, each class at least once.
        known: The classes of a model that was trained before, by number, which are kept if they include all labels.

    Example:
        >>> Classes(["10", "9", "10"]).names, Classes(["pos", "neg"], known=["neg", "neutral", "pos"]).names
        (['9', '10'], ['neg', 'neutral', 'pos'])
    """

    def __init__(self, labels: Iterable[Any], known: Sequence[str] = ()) -> None:
        found = {str(label) for label in labels}
        are_numbers = all(_is_whole(name) for name in found)
        self.names: list[str] = list(known) if found <= set(known) else sorted(found, key=int if are_numbers else str)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.names)

    def number(self, label: Any, table: Table, row: int) -> int:
        """Return the number of the class of a row.

        Raises:
            ConfigurationError: If the training data has no such class.
        """
        if str(label) not in self._numbers:
            raise ConfigurationError(
                f"{table.where(row)}: the class {shown(label)} is not in the training data. Its classes: "
                f"{', '.join(self.names[:20])}.{did_you_mean(label, self.names)}"
            )
        return self._numbers[str(label)]

    def config(self) -> dict[str, Any]:
        """Return the classes as configurations of transformers hold them."""
        return {"id2label": dict(enumerate(self.names)), "label2id": self._numbers}

    def __str__(self) -> str:
        """Return them in a few words."""
        shown_names = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
        return f"{len(self.names)} classes: {shown_names}"


def labels_in(table: Table, column: str) -> list[Any]:
    """Return the labels of a column, which have to be integers or texts."""
    return [_checked(value) for value in table.values(column, (str, int), _KINDS, "label_column")]


def check_several(classes: Classes, table: Table, column: str) -> None:
    """Raise unless there are two classes."""
    if len(classes) < 2:
        raise ConfigurationError(
            f"{table.source}: the column {column!r} has the single class {classes.names[0]!r}. Give data with at least "
            "two, or name another column with --label_column."
        )


def _checked(label: Any) -> Any:
    return int(label) if isinstance(label, bool) else label


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal()
