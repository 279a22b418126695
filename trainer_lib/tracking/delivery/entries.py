"""Queue entries: one tracker call each, with a JSON form for the spool."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker, Point
from trainer_lib.tracking.delivery.images import arrays, plain_images
from trainer_lib.tracking.delivery.plain_values import json_safe, plain_metrics, plain_settings, read


class Entry(NamedTuple):
    """One tracker call.

    Attributes:
        kind: "log", "settings", "images", "table", "artifact", or "call" for any other method.
        content: Its values, or its arguments by name.
        step: The training step.
        time: The time of the call, in seconds since 1970.
        kwargs: The user's further arguments for the backend.
    """

    kind: str
    content: Mapping[str, Any]
    step: int | None
    time: float
    kwargs: Mapping[str, Any]


def plain(entry: Entry, tracker: type[BuiltInTracker]) -> tuple[Entry | None, dict[str, str]]:
    """Return an entry with plain values for a built-in tracker, and the unsupported values by name."""
    refused: dict[str, str] = {}
    content: Mapping[str, Any] = entry.content
    if entry.kind == "log":
        content, refused = plain_metrics(content, tracker.takes_texts)
        if not content:
            return None, refused
    elif entry.kind == "settings":
        content = plain_settings(content)
    elif entry.kind == "images":
        is_described = entry.kwargs.keys() & tracker.image_options
        content = arrays(content) if is_described else plain_images(content, tracker.channels_last)
    step = None if entry.step is None else int(entry.step)  # JSON does not write numpy's integers
    return entry._replace(content=content, step=step), refused


def resolved(entry: Entry) -> Entry:
    """Return an entry with its tensors on the host, for a user's own tracker."""
    return entry._replace(content=read(dict(entry.content)))


def to_line(entry: Entry) -> str | None:
    """Return an entry as a line of JSON; `None` if it has no JSON form, such as images."""
    if entry.kind in ("images", "call"):
        return None
    content: Any = entry.content
    if entry.kind == "log":
        content = plain_metrics(content)[0]
    record = {"kind": entry.kind, "content": content, "step": entry.step, "time": entry.time, "kwargs": entry.kwargs}
    try:
        return json.dumps(json_safe(plain_settings(record)), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None


def from_line(line: str) -> Entry:
    """Return the entry of a line."""
    record = json.loads(line)
    content = record["content"]
    if record["kind"] == "log":
        content = {name: _number(value) for name, value in content.items()}
    return Entry(record["kind"], content, record["step"], record["time"], record["kwargs"])


class EntryCalls:
    """Makes the calls of entries in order; consecutive `log` calls become one `log_points` call.

    Args:
        tracker: The tracker.
        entries: The entries.

    Attributes:
        entries: The entries.
        done: The number of completed entries, also after a failure.
    """

    done: int

    def __init__(self, tracker: GeneralTracker, entries: list[Entry]) -> None:
        self._tracker = tracker
        self.entries: list[Entry] = entries
        self._takes_many = type(tracker).log_points is not GeneralTracker.log_points
        self._is_stopped = False
        self.done = 0

    def stop(self) -> None:
        """Make no further call, from another thread."""
        self._is_stopped: bool = True

    def make(self) -> None:
        """Make the calls."""
        while self.done < len(self.entries) and not self._is_stopped:
            entry = self.entries[self.done]
            if entry.kind != "log":
                _call(self._tracker, entry)
                self.done += 1
            elif self._takes_many:
                points = self._points()
                self._tracker.log_points(points)
                self.done += len(points)
            else:
                self._tracker.log(dict(entry.content), step=entry.step, **entry.kwargs)
                self.done += 1

    def _points(self) -> list[Point]:
        points: list[Point] = []
        for entry in self.entries[self.done :]:
            if entry.kind != "log":
                break
            points.append(Point(dict(entry.content), entry.step, entry.time, dict(entry.kwargs)))
        return points


def _call(tracker: Any, entry: Entry) -> None:
    content = dict(entry.content)
    match entry.kind:
        case "settings":
            tracker.store_init_configuration(content)
        case "images":
            tracker.log_images(content, step=entry.step, **entry.kwargs)
        case "table":
            tracker.log_table(**content, step=entry.step, **entry.kwargs)
        case "artifact":
            tracker.log_artifact(**content, **entry.kwargs)
        case _:
            target = tracker
            for name in content["path"]:
                target = getattr(target, name)
            target(*content["args"], **entry.kwargs)


def describe_error(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _number(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
