"""Samples that callbacks recorded: tables of texts and images, one for each evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any

_KEPT = 40  # tables of one name
_ROWS = 32
_IMAGE = "data:image/png;base64,"

Entry = Mapping[str, Any]


def is_sample_table(entry: Entry) -> bool:
    """Whether an event has `columns` and `rows`."""
    return isinstance(entry.get("columns"), list) and isinstance(entry.get("rows"), list)


def sample_tables(events: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the tables by name, each with its records in order.

    An image is recorded once: later tables of the same name show it too, where the text of its cell is the same.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    images: dict[tuple[str, int, int, str], str] = {}
    for entry in filter(is_sample_table, events):
        name = " ".join(str(part) for part in (entry["event"], entry.get("set")) if part).replace("_", " ")
        images |= {(name, *place): image for *place, image in _images(entry)}  # pyright: ignore[reportAssignmentType]
        rows = [
            [_cell(str(value), images.get((name, row, column, str(value)))) for column, value in enumerate(values)]
            for row, values in enumerate(entry["rows"][:_ROWS])
        ]
        tables.setdefault(name, []).append({"step": entry["step"], "columns": entry["columns"], "rows": rows})
    return [
        {"name": name, "records": records[-_KEPT:], "left_out": max(0, len(records) - _KEPT)}
        for name, records in tables.items()
    ]


def _images(entry: Entry) -> list[tuple[int, int, str, str]]:
    """Return row, column, text and image of each cell that has an image."""
    return [
        (row, column, str(entry["rows"][row][column]), image)
        for row, images in enumerate(entry.get("images") or ())
        for column, image in enumerate(images)
        if isinstance(image, str) and image.startswith(_IMAGE)
    ]


def _cell(text: str, image: str | None) -> str | dict[str, str]:
    return text if image is None else {"text": text, "image": image}
